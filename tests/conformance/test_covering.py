"""What is run on ranks covers models, schedules, their kinds and their layouts."""

from collections import Counter
from itertools import product

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, SCHEDULES, case_of, cases_of, layouts_for
from tests.conformance.covering import MODEL_KINDS, is_met_alone, met_on_ranks, properties


def test_every_model_meets_a_schedule_and_every_schedule_a_model() -> None:
    met = met_on_ranks()
    assert {model for model, _ in met} == set(MODELS)
    assert {schedule for _, schedule in met} == set(SCHEDULES)


def test_every_kind_of_model_meets_all_that_schedules_do() -> None:
    assert sorted(model for models in MODEL_KINDS.values() for model in models) == sorted(MODELS)
    kinds = {model: kind for kind, models in MODEL_KINDS.items() for model in models}
    found = {(kinds[model], each) for model, schedule in met_on_ranks() for each in properties(schedule)}
    assert found == set(product(MODEL_KINDS, range(5)))


def test_every_number_of_ranks_and_stages_is_run() -> None:
    """All layouts of each schedule are run in one process, below."""
    cases = [case_of(model, schedule, turn) for (model, schedule), turn in met_on_ranks().items()]
    every = {
        (each[0], case_of(MODELS[0], name, turn).num_stages)
        for name in SCHEDULES
        for turn, each in enumerate(layouts_for(PROCESSES, name))
    }
    assert {(case.num_ranks, case.num_stages) for case in cases} == every


def test_in_one_process_each_model_meets_three_schedules_and_each_schedule_three_models_in_all_its_layouts() -> None:
    cells = (cases_of(*cell, ONE_PROCESS, all_layouts=False) for cell in product(MODELS, SCHEDULES))
    cases = [case for (case,) in cells if is_met_alone(case)]
    assert min(Counter(case.model for case in cases).values()) >= 3
    for schedule in SCHEDULES:
        met = [case for case in cases if case.schedule == schedule]
        assert len(met) >= 3
        assert {(case.num_ranks, case.num_chunks, case.num_microbatches) for case in met} == set(
            layouts_for(PROCESSES, schedule)
        )
