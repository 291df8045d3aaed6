"""One server for all tests of a file that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import Running, running


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(RepeatingEngine()) as found:
        yield found
