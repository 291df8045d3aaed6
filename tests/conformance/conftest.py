"""The engines that take part in the matrix, and what becomes of its errors."""

from collections.abc import Iterator

import pytest

from tests.conformance.cases import MODELS, SCHEDULES, cases_of
from tests.conformance.outcomes import Runner, in_one_process
from tests.conformance.table import PAGE, Table
from tests.runtime.small import small_matrices

RUNNERS: dict[str, Runner] = {"one process": in_one_process}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="run the parity matrix over every number of stages and write docs/conformance.md",
    )


def _writes(config: pytest.Config) -> bool:
    return bool(config.getoption("--write-docs", default=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that takes a `case` each case of the matrix."""
    if "case" in metafunc.fixturenames:
        everything = _writes(metafunc.config)
        # A model at a time: what is made for one serves all of its cases.
        cells = [(model, schedule) for model in MODELS for schedule in SCHEDULES]
        cases = [case for cell in cells for case in cases_of(*cell, all_layouts=everything)]
        metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Collects the errors of a run, and writes them down if that was asked for and all were seen."""
    noted = Table()
    yield noted
    if _writes(request.config):
        assert noted.is_whole, "docs/conformance.md is written by a run of all cases, in one process (no -n)"
        PAGE.write_text(noted.page(), encoding="utf-8")
