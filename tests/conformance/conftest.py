"""The engines that take part in the matrix, and what becomes of its errors."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, RUNNERS, SCHEDULES, Case, case_of, cases_of
from tests.conformance.covering import met_on_ranks
from tests.conformance.outcomes import Runner, in_one_process
from tests.conformance.processes import run_on_ranks
from tests.conformance.table import PAGE, Table
from tests.crowd import Crowds
from tests.stages.small import small_matrices


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write docs/conformance.md from what the parity matrix shows (no -n)",
    )
    parser.addoption(
        "--every-layout", action="store_true", help="run each cell of the parity matrix in all its numbers of stages"
    )


def _writes(config: pytest.Config) -> bool:
    return bool(config.getoption("--write-docs", default=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that takes a `case` each case of the matrix, with each runner, and whether to run it twice.

    One that takes a `runner` alone gets each.
    """
    if "case" in metafunc.fixturenames:
        config = metafunc.config
        everything = bool(config.getoption("--every-layout", default=False))
        whole = everything or _writes(config) or bool(config.getoption("--whole", default=False))
        rows = [
            (case, runner, whole or (MODELS.index(case.model) + SCHEDULES.index(case.schedule)) % 5 == 0)
            for case, runner in (_whole(everything) if whole else _covering())
        ]
        ids = [f"{case}-{runner.replace(' ', '-')}" for case, runner, _ in rows]
        metafunc.parametrize(("case", "runner_name", "twice"), rows, ids=ids)
    elif "runner_name" in metafunc.fixturenames:
        metafunc.parametrize("runner_name", RUNNERS)


def _whole(all_layouts: bool) -> list[tuple[Case, str]]:
    """Every model with every schedule. A model at a time: what is made for one serves all of its cases."""
    return [
        (case, runner)
        for model in MODELS
        for schedule in SCHEDULES
        for runner in RUNNERS
        for case in cases_of(model, schedule, runner, all_layouts=all_layouts)
    ]


def _covering() -> list[tuple[Case, str]]:
    """The same in one process, and what is enough where ranks are processes."""
    alone = [pair for pair in _whole(False) if pair[1] == ONE_PROCESS]
    met = met_on_ranks().items()
    return alone + [(case_of(model, schedule, turn), PROCESSES) for (model, schedule), turn in met]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture
def runner(runner_name: str, crowds: Crowds) -> Runner:
    return in_one_process if runner_name == ONE_PROCESS else partial(run_on_ranks, crowds=crowds)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Collects the errors of a run, and writes them down if that was asked for and all were seen."""
    noted = Table(PAGE.read_text(encoding="utf-8"))
    yield noted
    if _writes(request.config):
        assert request.session.testsfailed == 0, "docs/conformance.md is written by a run in which all pass"
        assert noted.is_whole, "docs/conformance.md is written by a run of all cases of a model (no -n)"
        PAGE.write_text(noted.page(), encoding="utf-8")
