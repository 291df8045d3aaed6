"""docs/conformance.md shows what the matrix runs."""

import pytest

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, RUNNERS, SCHEDULES, cases_of
from tests.conformance.table import PAGE, Errors, Table, without_figures


def note_row(table: Table, runner: str, model: str, error: float) -> None:
    """A run of all cases of a model, exact but for those of four stages."""
    for schedule in SCHEDULES:
        for case in cases_of(model, schedule, runner, all_layouts=True):
            found = error if case.num_stages == 4 else 0.0
            table.note(runner, case, Errors(gradient=found, weight=10 * found if schedule == "zb-v" else found))


@pytest.fixture(scope="module")
def page() -> str:
    """What a run of all models writes."""
    table = Table()
    for runner in RUNNERS:
        for model in MODELS:
            assert not table.is_whole
            note_row(table, runner, model, 2.4e-7)
    assert table.is_whole
    return table.page()


def rows_of(page: str, model: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {model} |")]


def test_the_page_is_what_a_run_would_write_but_for_the_figures(page: str, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-docs", default=False):
        pytest.skip("the page is written at the end of this run")
    assert without_figures(PAGE.read_text(encoding="utf-8")) == without_figures(page)


def test_a_page_shows_the_worst_error_of_each_cell_and_of_the_weights(page: str) -> None:
    assert rows_of(page, "gpt2") == [["gpt2", *["2e-7"] * len(SCHEDULES), "2e-6"]] * len(RUNNERS)


def test_a_run_of_one_model_changes_the_rows_of_that_model_only(page: str) -> None:
    table = Table(page)
    for runner in RUNNERS:
        note_row(table, runner, "gpt2", 0.0)
    assert table.is_whole
    again = table.page()
    assert rows_of(again, "gpt2") == [["gpt2", *["0"] * (len(SCHEDULES) + 1)]] * len(RUNNERS)
    others = [[line for line in each.splitlines() if not line.startswith("| gpt2 |")] for each in (page, again)]
    assert others[0] == others[1]


def test_a_row_is_never_of_two_runs(page: str) -> None:
    table = Table(page)
    (case, *_) = cases_of("gpt2", "zb-v", PROCESSES, all_layouts=True)
    table.note(PROCESSES, case, Errors(gradient=0.0, weight=0.0))
    assert not table.is_whole


def test_a_page_about_other_schedules_is_no_source_of_rows(page: str) -> None:
    table = Table(page.replace("| zb-v |", "| zb-w |"))
    note_row(table, ONE_PROCESS, "gpt2", 0.0)
    assert not table.is_whole


def test_without_its_figures_a_page_still_has_models_schedules_and_stages(page: str) -> None:
    bare = without_figures(page)
    assert bare == without_figures(page.replace("2e-7", "0"))
    assert bare != without_figures(page.replace("| gpt2 |", "| gpt3 |"))
    assert bare != without_figures(page.replace("| zb-v |", "| zb-w |"))
    assert bare != without_figures(page.replace("| 2, 3, 4 |", "| 2, 4 |"))


def test_every_schedule_has_2_and_4_stages_and_those_without_chunks_3() -> None:
    for schedule in SCHEDULES:
        counts = {case.num_stages for case in cases_of("gpt2", schedule, ONE_PROCESS, all_layouts=True)}
        assert {2, 4} <= counts <= {2, 3, 4}
    for runner in RUNNERS:
        assert {case.num_stages for case in cases_of("gpt2", "zb-h1", runner, all_layouts=True)} == {2, 3, 4}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_run_of_the_square_has_each_number_of_stages_for_every_model(runner: str) -> None:
    for model in MODELS:
        cases = [case for schedule in SCHEDULES for case in cases_of(model, schedule, runner, all_layouts=False)]
        assert len(cases) == len(SCHEDULES)
        assert {case.num_stages for case in cases} == {2, 3, 4}
        assert all(case.num_ranks > 1 for case in cases)
