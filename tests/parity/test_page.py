"""docs/composition.md shows what the matrix proves and what the rules refuse."""

import pytest

from shardwise.parity.compare import Comparison, Difference
from tests.parity.cases import CASES
from tests.parity.page import PAGE, Proofs, without_figures


@pytest.fixture(scope="module")
def page() -> str:
    """What a run of all plans writes."""
    proofs = Proofs()
    off = [Difference(kind="gradient", name="x", step=0, rank=0, error=2.4e-7, times=1.0)]
    for cases in CASES.values():
        for model, plan in cases:
            assert not proofs.are_all
            proofs.note(model, plan, Comparison(differences=off))
    assert proofs.are_all
    return proofs.page()


@pytest.mark.usefixtures("proofs")
def test_the_page_is_what_a_run_would_write_but_for_the_figures(page: str, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-composition", default=False):
        pytest.skip("the page is written at the end of this run")
    assert without_figures(PAGE.read_text(encoding="utf-8")) == without_figures(page)


def test_a_row_has_the_worst_errors(page: str) -> None:
    assert "| `dp=2` | tied | 0 | 2e-7 | 0 | 0 |" in page.splitlines()


def test_without_its_figures_a_page_still_has_plans_models_and_refusals(page: str) -> None:
    bare = without_figures(page)
    assert bare == without_figures(page.replace("2e-7", "0"))
    assert bare != without_figures(page.replace("| `dp=2` | tied |", "| `dp=2` | untied |"))
    assert bare != without_figures(page.replace("there is only one", "there are two"))


def test_rows_of_plans_that_are_not_run_stay(page: str) -> None:
    proofs = Proofs(page)
    assert proofs.are_all
    assert proofs.page() == page
    proofs.note("tied", "dp=2", Comparison(differences=[]))
    assert "| `dp=2` | tied | 0 | 0 | 0 | 0 |" in proofs.page().splitlines()
