"""Options of the matrix of plans, and the page that it writes."""

from collections.abc import Iterator

import pytest

from tests.parity.page import PAGE, Proofs
from tests.stages.small import small_matrices


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-composition",
        action="store_true",
        help="write docs/composition.md from what the matrix of plans shows (no -n)",
    )


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture(scope="session")
def proofs(request: pytest.FixtureRequest) -> Iterator[Proofs]:
    """Collects the errors of a run, and writes them down if that was asked for and all were seen."""
    noted = Proofs(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    yield noted
    if request.config.getoption("--write-composition", default=False):
        assert request.session.testsfailed == 0, "docs/composition.md is written by a run in which all pass"
        assert noted.are_all, "docs/composition.md lacks plans: a run of tests/parity/test_matrix.py measures them"
        PAGE.write_text(noted.page(), encoding="utf-8")
