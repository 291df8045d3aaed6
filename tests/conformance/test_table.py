"""docs/conformance.md lists what the matrix runs."""

import pytest

from tests.conformance.cases import MODELS, SCHEDULES, cases_of
from tests.conformance.table import PAGE, Table, listed


def test_the_page_lists_the_models_and_schedules_that_are_run(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-docs", default=False):
        pytest.skip("the page is written at the end of this run")
    assert listed(PAGE.read_text(encoding="utf-8")) == (MODELS, SCHEDULES)


def test_a_page_that_is_written_lists_them_with_the_worst_error_of_each() -> None:
    table = Table()
    for model in MODELS:
        for schedule in SCHEDULES:
            assert not table.is_whole
            for case in cases_of(model, schedule, all_layouts=True):
                table.note(case, 2.4e-7 if case.num_stages == 2 else 0.0)
    assert table.is_whole
    assert listed(table.page()) == (MODELS, SCHEDULES)
    row = next(line for line in table.page().splitlines() if line.startswith("| gpt2 |"))
    assert set(row.strip("| ").split(" | ")) == {"gpt2", "2e-7"}


def test_every_schedule_has_2_and_4_stages_and_those_without_chunks_3() -> None:
    for schedule in SCHEDULES:
        counts = {case.num_stages for case in cases_of("gpt2", schedule, all_layouts=True)}
        assert {2, 4} <= counts <= {2, 3, 4}
    assert {case.num_stages for case in cases_of("gpt2", "zb-h1", all_layouts=True)} == {2, 3, 4}


def test_a_short_run_has_each_number_of_stages_for_every_model() -> None:
    for model in MODELS:
        cases = [case for schedule in SCHEDULES for case in cases_of(model, schedule, all_layouts=False)]
        assert len(cases) == len(SCHEDULES)
        assert {case.num_stages for case in cases} == {2, 3, 4}
        assert all(case.num_ranks > 1 for case in cases)
