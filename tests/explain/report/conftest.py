"""A browser for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.explain.report.browser import Browser, find_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("no browser: chromium and chromedriver are not installed (make browser)")
    with Browser() as found:
        yield found
