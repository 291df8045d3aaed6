"""Where tests let `parallelize` cut without a trial.

A trial runs a module and its loss a dozen times before anything is cut, on every rank: a quarter of what a small test
on ranks costs. Tests of what comes after it, of states, experts and wires, do without. What a trial finds, and that it
finds nothing where nothing is wrong, is tried in `habits`, `parity`, `conformance`, `stages` and `sharding/tensor`.
A test that says `verify=` itself has what it says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent
#: Folders and files of tests whose engines are made without trials.
UNTRIED = (
    "engine",
    "execution",
    "explain",
    "fusion/test_ranks.py",
    "kernels",
    "nccl",
    "ranks",
    "sharding/context/test_attention.py",
    "sharding/expert",
    "sharding/test_dropout.py",
    "states",
    "trace",
    "training",
)


def is_untried(path: Path) -> bool:
    """Whether the tests of a file are among those."""
    return any(path.is_relative_to(ROOT / each) for each in UNTRIED)


def are_untried() -> bool:
    """Whether this process makes its engines so now."""
    from shardwise.engine.parallelize import parallelize

    return not _defaults(parallelize)["verify"]


@contextmanager
def untried() -> Iterator[None]:
    """Where engines are made without a trial, unless one is asked for."""
    from shardwise.engine.parallelize import parallelize

    defaults = _defaults(parallelize)
    before = defaults["verify"]
    defaults["verify"] = False
    try:
        yield
    finally:
        defaults["verify"] = before


def _defaults(function: object) -> dict[str, object]:
    found = getattr(function, "__kwdefaults__")  # noqa: B009 - it is no attribute that a callable has by its type
    assert isinstance(found, dict)
    return found
