"""The engines that take part in the matrix, and what becomes of its errors."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, RUNNERS, SCHEDULES, Case, case_of, cases_of
from tests.conformance.covering import is_met_alone, met_on_ranks, schedule_kind
from tests.conformance.outcomes import Runner, in_one_process
from tests.conformance.processes import run_on_ranks
from tests.conformance.table import PAGE, Table
from tests.same import Trained
from tests.stages.small import small_matrices
from tests.trials import untried

#: In which worker of xdist a case runs: all that have ranks in the same.
_MARKS = {ONE_PROCESS: (), PROCESSES: (pytest.mark.xdist_group("parity"),)}


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

    One that takes a `schedule` and a `runner` gets each with each; ranks, without `--whole`, one schedule of each kind.
    """
    if "case" in metafunc.fixturenames:
        config = metafunc.config
        everything = bool(config.getoption("--every-layout", default=False))
        whole = everything or _writes(config) or bool(config.getoption("--whole", default=False))
        metafunc.parametrize(
            ("case", "runner_name", "twice"),
            [
                pytest.param(
                    case,
                    runner,
                    # A second run of every schedule is in `test_five_failures.py`.
                    whole or (MODELS.index(case.model) + SCHEDULES.index(case.schedule)) % 12 == 0,
                    id=f"{case}-{runner.replace(' ', '-')}",
                    marks=_MARKS[runner],
                )
                for case, runner in (_whole(everything) if whole else _covering())
            ],
        )
    elif "runner_name" in metafunc.fixturenames:
        metafunc.parametrize(
            ("runner_name", "schedule"),
            [
                pytest.param(runner, schedule, marks=(*_MARKS[runner], *_marks_of(runner, schedule)))
                for runner in RUNNERS
                for schedule in SCHEDULES
            ],
        )


def _marks_of(runner: str, schedule: str) -> tuple[pytest.MarkDecorator, ...]:
    first = {schedule_kind(each): each for each in reversed(SCHEDULES)}
    return () if runner == ONE_PROCESS or schedule in first.values() else (pytest.mark.whole,)


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
    """Two cells of seven in one process, and what is enough on ranks. Two steps show what a third would."""
    alone = [(case, runner) for case, runner in _whole(False) if runner == ONE_PROCESS and is_met_alone(case)]
    met = met_on_ranks().items()
    several = alone + [(case_of(model, schedule, turn), PROCESSES) for (model, schedule), turn in met]
    # Of weights that are a step old the third step is the first to have other ones than the plain module's second.
    return [(case if case.is_stale else replace(case, lengths=case.lengths[:2]), runner) for case, runner in several]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture
def runner(runner_name: str, request: pytest.FixtureRequest) -> Iterator[Runner]:
    """What runs a case. There are ranks only where it is asked for: most cases do without.

    Ranks cut what one process has tried, and without `--whole` they do not try it again.
    """
    if runner_name == ONE_PROCESS:
        yield in_one_process
        return
    with nullcontext() if request.config.getoption("--whole") else untried():
        yield partial(run_on_ranks, crowds=request.getfixturevalue("crowds"))


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, Case], Trained]:
    """What cases came to, for tests that look at one case from several sides."""
    return {}


@pytest.fixture
def outcome_of(runner: Runner, runner_name: str, seen: dict[tuple[str, Case], Trained]) -> Runner:
    """A runner that runs each case once."""

    def once(case: Case) -> Trained:
        if (runner_name, case) not in seen:
            seen[runner_name, case] = runner(case)
        return seen[runner_name, case]

    return once


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Collects the errors of a run, and writes them down if that was asked for and all were seen."""
    noted = Table(PAGE.read_text(encoding="utf-8"))
    yield noted
    if _writes(request.config):
        assert request.session.testsfailed == 0, "docs/conformance.md is written by a run in which all pass"
        assert noted.is_whole, "docs/conformance.md is written by a run of all cases of a model (no -n)"
        PAGE.write_text(noted.page(), encoding="utf-8")
