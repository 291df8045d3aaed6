"""What every test may count on, and the ranks that tests share."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.left_out import LEFT_OUT, left_out_of
from tests.trials import is_untried, untried

# A busy machine fails no test: how long an example takes, or takes to be made, is not looked at. Nor does the hour:
# examples are the same in every run, and new ones with `--whole`.
for _name, _is_same in (("the same examples", True), ("new examples", False)):
    hypothesis.settings.register_profile(
        _name, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=_is_same
    )

# What needs torch is imported by those that use it: most tests of plans and schedules do without.
if TYPE_CHECKING:
    from shardwise.ranks.spawn import Ranks
    from tests.crowd import Crowds
    from tests.explain.report.browser import Browser

#: The groups of tests that have ranks: two of them, programs of users (`habits`) and others; more, held against one
#: device (`parity`, `conformance`); all others. Four groups, so that none takes as long as the whole suite.
HABITS, PAIRS, PARITY, RANKS = "habits", "pairs", "parity", "ranks"
#: All tests with a browser: to start one takes 3 s of a core.
BROWSER = "browser"
#: What workers begin with: the groups, then the files that take longest. Else one of these would come last, and a
#: worker would be alone with it at the end.
_FIRST = (
    RANKS,
    HABITS,
    PAIRS,
    "launch-test_slurm",
    PARITY,
    "promises",
    "kernels-test_nets",
    "planner-test_search",
    "training-test_train",
    "tests-test_wheel",
    BROWSER,
    "stages-test_compiled",
)

# Until all tests are collected nothing is thrown away: the collector would look through all of torch again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="run also what `make test` leaves out: cases of which others have every part",
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("new examples" if config.getoption("--whole") else "the same examples")
    config.addinivalue_line("markers", "whole: a case of which other cases have every part; --whole runs it too")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = (
            False  # Groups of many tests would come first, and not those that take longest.
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Before workers of xdist are started: they are forks of this process, if it has one thread (`make test`)."""
    if sys.platform == "linux" and os.environ.get("OMP_NUM_THREADS") == "1":
        from tests.forked_workers import fork_workers

        fork_workers()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--whole` alone runs, and say what runs in one worker (`--dist loadgroup`).

    That is all tests that share ranks, in four groups, and else the tests of a file. Ranks are processes: if any
    worker had any of them, there would be twice as many on the same cores.
    """
    if not (config.getoption("--whole") or config.getoption("--write-composition", default=False)):
        left_out = left_out_of(items)
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = frozenset(item.nodeid for item in left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    if getattr(config.option, "loadgroup", False):
        items.sort(key=_turn)
        for item in items:
            _tell_group(item)


def _group_of(item: pytest.Item) -> str:
    fixtures = set(getattr(item, "fixturenames", ()))
    if item.path.parent.name == "promises":
        return "promises"  # They read all sources, once.
    if "browser" in fixtures:
        return BROWSER
    if "crowds" not in fixtures:
        return f"{item.path.parent.name}-{item.path.stem}"
    count = getattr(item, "callspec", None) and item.callspec.params.get("count")  # type: ignore[attr-defined]
    is_pair = count == 2 or ("two" in fixtures and fixtures.isdisjoint({"three", "four", "eight"}))
    if is_pair:
        return HABITS if item.path.parent.name == "habits" else PAIRS
    return PARITY if item.path.parent.name in ("parity", "conformance") else RANKS


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group is not None else None
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _tell_group(item: pytest.Item) -> None:
    """Put a test's group behind its name, where the scheduler reads it.

    pytest-xdist 3.8 does so itself, but not where that is heard since pytest 9.2: then any worker had any test.
    """
    group = item.get_closest_marker("xdist_group")
    structured = getattr(item, "_id", None)
    if group is not None and structured is not None:
        item._id = type(structured).parse(f"{item.nodeid}@{group.args[0]}")


def pytest_collection_finish() -> None:
    """What is there now stays to the end: 5 % of the suite's time went into looking through it."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let all go when this process ends: else what libraries have left then is called leaked.

    Not before: at its end pytest collects twice, and would look through all of torch: 1.5 s of a core in each worker.
    """
    atexit.register(gc.unfreeze)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a worker's first ranks: all of them are forked from one process that has imported what they need.

    A worker that is a fork has that process from its first test on: commands and scripts of other tests start ranks
    too, and later there may be a thread, beside which nothing is forked.
    """
    group = item.get_closest_marker("xdist_group")
    has_ranks = group is not None and group.args[0] in (HABITS, PAIRS, PARITY, RANKS)
    if has_ranks or (hasattr(item.config, "workerinput") and "tests.crowd" in sys.modules):
        from tests.crowd import import_once

        import_once()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing said about colour or width: tests compare what is printed, and CI machines often force colour."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture(autouse=True)
def nothing_left_set() -> Iterator[None]:
    """A test that changes a setting of torch sets it back: others in its process would compute with it."""
    if "torch" not in sys.modules:
        yield
        return
    from tests.settings import Settings

    before = Settings.now()
    yield
    assert Settings.now() == before, "the test has left a setting of torch changed"


@pytest.fixture(autouse=True)
def trials(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines are made with a trial of what they cut, or without one where that is not what is tested."""
    with untried() if is_untried(request.path) else nullcontext():
        yield


@pytest.fixture(scope="session")
def crowds() -> "Iterator[Crowds]":
    """Ranks by their number, up from the first test that wants so many to the last of all.

    After a failure there are new ones. A test that kills ranks, or that is about how they start, has its own.
    """
    from tests.crowd import Crowds

    found = Crowds()
    yield found
    found.close()


@pytest.fixture(scope="session")
def two(crowds: "Crowds") -> "Ranks":
    return crowds.of(2)


@pytest.fixture(scope="session")
def three(crowds: "Crowds") -> "Ranks":
    return crowds.of(3)


@pytest.fixture(scope="session")
def four(crowds: "Crowds") -> "Ranks":
    return crowds.of(4)


@pytest.fixture(scope="session")
def eight(crowds: "Crowds") -> "Ranks":
    return crowds.of(8)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """A real one without a window, for all tests of pages."""
    from tests.explain.report.browser import Browser, find_browser

    if find_browser() is None:
        pytest.skip("no browser: chromium and chromedriver are not installed (make browser)")
    with Browser() as found:
        yield found


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the library warns of, line by line.

    pytest's own `caplog` is switched off: three times in every test it goes to each of the 60 loggers that pass nothing
    on once torch and transformers are there. Under a profiler that was 13 % of `tests/model`; without one, in
    `tests/cost` and `tests/cluster`, no difference was seen.
    """
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("shardwise").addHandler(handler)
    yield lines
    logging.getLogger("shardwise").removeHandler(handler)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where tests run in the background and whoever started them has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
