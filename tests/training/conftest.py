"""Ranks that stay up for all of these tests, so that torch is imported once."""

from collections.abc import Iterator

import pytest

from shardwise.runtime.spawn import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
