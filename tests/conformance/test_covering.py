"""What is run on ranks covers models, schedules, their kinds and their layouts."""

from collections import Counter
from itertools import product

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, SCHEDULES, case_of, cases_of, layouts_for
from tests.conformance.covering import MODEL_KINDS, NUM_MET, is_met_alone, met_on_ranks, schedule_kind


def test_each_model_meets_two_schedules_and_each_schedule_two_models_or_more() -> None:
    met = met_on_ranks()
    counts = Counter(model for model, _ in met)
    assert set(counts) == set(MODELS)
    assert min(counts.values()) >= NUM_MET
    counts = Counter(schedule for _, schedule in met)
    assert set(counts) == set(SCHEDULES)
    assert min(counts.values()) >= NUM_MET


def test_every_kind_of_model_meets_every_kind_of_schedule() -> None:
    assert sorted(model for models in MODEL_KINDS.values() for model in models) == sorted(MODELS)
    kinds = {model: kind for kind, models in MODEL_KINDS.items() for model in models}
    found = {(kinds[model], schedule_kind(schedule)) for model, schedule in met_on_ranks()}
    assert found == set(product(MODEL_KINDS, map(schedule_kind, SCHEDULES)))


def test_each_schedule_runs_in_all_its_layouts_of_several_ranks() -> None:
    for schedule in SCHEDULES:
        cases = [case_of(model, each, turn) for (model, each), turn in met_on_ranks().items() if each == schedule]
        ran = {(case.num_ranks, case.num_chunks, case.num_microbatches) for case in cases}
        assert ran == set(layouts_for(PROCESSES, schedule))


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
