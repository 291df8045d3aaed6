"""What a run without `--whole` leaves out: what is marked `whole`, and of long rows of cases all but a part.

Dear tests whose parts others have are left out too, and name them (`tests/stand_ins.py`). Of a row (one test with many
parameters) one case in two to twelve runs, at least one, and those that have found a fault are among these; but

    each value of each parameter, where there are several parameters, is in a case that runs
    a case that has found a seeded fault runs always (`tests/mutations`)
    a test that is named on the command line with its parameters runs, as it is alone then
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.stand_ins import STAND_INS

ROOT = Path(__file__).parents[1]
#: The names of the tests that this run leaves out.
LEFT_OUT = pytest.StashKey[frozenset[str]]()

#: One case in so many is run of the tests of a file, or of a test. Here a case is like its neighbours but for a size, a
#: family or a plan, and costs most; `benchmarks/suite.py` tells what each costs.
ONE_IN = {
    "tests/conformance/test_five_failures.py": 10,
    "tests/conformance/test_parity.py": 5,
    "tests/cost/test_step.py": 3,
    "tests/dataflow/test_flows.py": 4,
    "tests/dataflow/test_graphs.py": 3,
    "tests/engine/test_composed.py": 4,
    "tests/engine/test_engine.py": 5,
    "tests/engine/test_gpu_launched.py": 3,
    "tests/engine/test_optimizer_state.py": 3,
    "tests/engine/test_outputs.py": 4,
    "tests/engine/test_process_engine.py": 4,
    "tests/execution/test_local.py": 4,
    "tests/execution/test_memory_by_owner.py": 2,
    "tests/execution/test_stale.py": 8,
    "tests/explain/doctor/test_corpus.py": 5,
    "tests/explain/doctor/test_following.py": 3,
    "tests/explain/doctor/test_gpu_corpus.py": 3,
    "tests/explain/doctor/test_real.py": 6,
    "tests/habits/test_crossing.py": 3,
    "tests/kernels/test_cache_write.py": 8,
    "tests/kernels/test_compact_states.py": 4,
    "tests/kernels/test_cross_entropy.py": 10,
    "tests/kernels/test_decode_step.py": 4,
    "tests/kernels/test_experts.py": 6,
    "tests/kernels/test_fp8.py": 8,
    "tests/kernels/test_gated.py": 3,
    "tests/kernels/test_latent_attention.py": 4,
    "tests/kernels/test_narrow.py": 4,
    "tests/kernels/test_norm.py": 8,
    "tests/kernels/test_paged_attention.py": 8,
    "tests/kernels/test_rotary.py": 10,
    "tests/kernels/test_sampling_kernel.py": 8,
    "tests/launch/test_kubernetes.py::test_a_manifest_is_valid_in_every_release": 2,
    "tests/model/test_catalogue.py::test_every_name_gives_a_model_that_knows_its_own": 4,
    "tests/model/test_trace.py": 10,
    "tests/nccl/test_mistakes.py::test_a_mistake_in_the_library_is_found": 5,
    "tests/nccl/test_plans.py": 4,
    "tests/nccl/test_plans.py::test_what_the_ranks_of_a_plan_ask_of_nccl_is_right": 6,
    "tests/nets/hf/test_files.py": 6,
    "tests/nets/test_dropout.py": 3,
    "tests/nets/test_parity.py": 6,
    "tests/nets/test_pipeline.py": 4,
    "tests/parity/test_check.py": 2,
    "tests/parity/test_check.py::test_a_fault_is_caught_and_its_tensor_named": 8,
    "tests/parity/test_check_faults.py::test_a_fault_is_found": 6,
    "tests/parity/test_fp8.py": 2,
    "tests/parity/test_models.py": 5,
    "tests/parity/test_odd.py::test_ranks_train_as_one_device_does": 4,
    "tests/placing/test_activations.py": 7,
    "tests/placing/test_host.py": 5,
    "tests/placing/test_models.py": 5,
    "tests/placing/test_parity.py": 5,
    "tests/planner/test_measured.py": 4,
    "tests/planner/test_odd_runs.py": 5,
    "tests/planner/test_search.py::test_no_candidate_of_all_is_faster_than_what_was_found": 4,
    "tests/ranks/test_told.py": 2,
    "tests/ranks/test_transport.py": 3,
    "tests/schedule/test_auto.py": 5,
    "tests/schedule/test_command.py": 3,
    "tests/schedule/test_facts_formulas.py": 9,
    "tests/schedule/test_facts_tables.py": 2,
    "tests/schedule/test_generators.py": 3,
    "tests/schedule/test_makespan.py": 3,
    "tests/schedule/test_mutations.py": 4,
    "tests/schedule/test_passes.py": 5,
    "tests/schedule/test_simulate.py": 3,
    "tests/schedule/test_text.py": 4,
    "tests/schedule/test_verify.py::test_every_schedule_passes_in_every_form": 4,
    "tests/serving/http/test_bad_input.py": 3,
    "tests/serving/test_exact.py": 12,
    "tests/serving/test_narrow_weights.py": 3,
    "tests/serving/test_overlap.py": 8,
    "tests/serving/test_sharded.py::test_ranks_give_the_tokens_of_one_device": 4,
    "tests/serving/test_tiers.py": 3,
    "tests/sharding/context/test_attention.py": 10,
    "tests/sharding/context/test_kernels.py": 4,
    "tests/sharding/context/test_models.py": 8,
    "tests/sharding/expert/test_engines.py": 5,
    "tests/sharding/expert/test_loads.py": 3,
    "tests/sharding/expert/test_move.py": 5,
    "tests/sharding/expert/test_parity.py": 5,
    "tests/sharding/expert/test_stages.py": 2,
    "tests/sharding/tensor/test_communication.py": 4,
    "tests/sharding/tensor/test_families.py": 14,
    "tests/sharding/tensor/test_lengths.py": 4,
    "tests/sharding/tensor/test_shard.py": 9,
    "tests/sharding/test_dropout.py": 4,
    "tests/stages/test_compiled.py": 4,
    "tests/stages/test_loss_trial.py": 3,
    "tests/stages/test_recompute.py": 3,
    "tests/stages/test_split.py::test_a_cut_through_blocks_is_more_even_and_the_same_model": 3,
    "tests/stages/test_split_meta.py": 2,
    "tests/stages/test_split_parity.py": 5,
    "tests/states/buckets/test_equality.py": 6,
    "tests/states/buckets/test_memory_and_traffic.py": 4,
    "tests/states/streaming/test_anything.py": 3,
    "tests/states/streaming/test_scratch.py": 3,
    "tests/states/tiers/test_activation_offload.py": 3,
    "tests/states/tiers/test_engines.py": 4,
    "tests/states/tiers/test_host_states.py": 4,
    "tests/states/tiers/test_host_updates.py": 4,
    "tests/states/tiers/test_offloaded_alone.py": 10,
    "tests/states/tiers/test_offloaded_buckets.py": 12,
    "tests/states/tiers/test_optimizer_in_backward.py": 4,
    "tests/states/tiers/test_races.py": 2,
    "tests/states/tiers/test_weights.py": 5,
    "tests/trace/test_streams.py": 4,
    "tests/training/test_dcp.py": 2,
    "tests/training/test_health.py": 3,
    "tests/training/test_verify.py": 2,
}


@cache
def finders() -> dict[str, str]:
    """For each seeded fault, the test that found it when the faults were last tried."""
    results = json.loads((ROOT / "benchmarks" / "results" / "mutations.json").read_text(encoding="utf-8"))["results"]
    return {fault: row["test"] for fault, row in results["new"]["faults"].items()}


def left_out_of(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that are run with `--whole` alone."""
    marked = {id(each) for each in items if each.get_closest_marker("whole") is not None or _has_a_stand_in(each)}
    needed = set(finders().values())
    rows: dict[str, list[pytest.Item]] = {}
    for each in items:
        if id(each) not in marked:
            rows.setdefault(each.nodeid.partition("[")[0], []).append(each)
    turns: dict[str, int] = {}
    for row, cases in rows.items():
        path = row.partition("::")[0]
        one_in = ONE_IN.get(row) or ONE_IN.get(path)
        if one_in is not None:
            turn = turns[path] = turns.get(path, -1) + 1
            kept = _kept(cases, one_in, turn, needed)
            marked |= {id(each) for number, each in enumerate(cases) if number not in kept}
    return [each for each in items if id(each) in marked]


def _has_a_stand_in(item: pytest.Item) -> bool:
    return item.nodeid in STAND_INS or item.nodeid.partition("[")[0] in STAND_INS


def _kept(cases: Sequence[pytest.Item], one_in: int, turn: int, needed: set[str]) -> set[int]:
    """Which cases of a row are run; `turn` is another for the next row, so that both do not keep the same values."""
    kept = {number for number, each in enumerate(cases) if each.nodeid in needed}
    in_turn = [number for number in range(len(cases)) if (number + turn) % one_in == 0] or [turn % len(cases)]
    kept.update(in_turn[: max(0, len(in_turn) - len(kept))])
    if not hasattr(cases[0], "callspec"):
        return kept  # One test without parameters.
    for axis in _axes([getattr(each, "callspec")._idlist for each in cases]):  # noqa: B009 - pytest has no name for its type
        met = {axis[number] for number in kept}
        for number, value in enumerate(axis):
            if value not in met:
                met.add(value)
                kept.add(number)
    return kept


def _axes(words: Sequence[Sequence[str]]) -> Iterable[tuple[str, ...]]:
    """What each of several parameters is called in each case; none if there is one, of which all values would be kept.

    By their words, one for each `parametrize`: since pytest 9.2 `callspec.indices` count pairs of stacked ones, and all
    of these would be kept.
    """
    several = sorted(column for column in set(zip(*words, strict=False)) if len(set(column)) > 1)
    return several if len(several) > 1 else []
