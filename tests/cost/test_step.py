"""The whole step: parts that add up, layouts ranked as physics says, and pipelines against the simulator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.compute import Seconds
from shardwise.cost.constants import CONSTANTS
from shardwise.cost.layouts import Layouts
from shardwise.cost.pipeline import SCHEDULES, span, spans
from shardwise.cost.places import in_flight, in_flight_under
from shardwise.cost.software import Software
from shardwise.cost.step import price
from shardwise.model.catalogue import get_model
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import simulate
from tests.cost.priced import ask


def test_the_parts_add_up_to_the_step_and_the_interval_is_around_it() -> None:
    found = ask("8x8xh100", tp=[1, 2, 8], dp=[64, 16, 4], pp=[1, 2, 2], num_microbatches=[1, 4, 16], zero=1)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert (found.low < found.seconds).all()
    assert (found.seconds < found.high).all()


@pytest.mark.parametrize("steps_overlap", [False, True])
def test_schedules_cost_and_hold_the_same_one_by_one_as_all_at_once(steps_overlap: bool) -> None:
    pp, steps, codes = np.array([1, 2, 4, 8]), np.array([4, 4, 2, 32]), np.arange(len(SCHEDULES))
    first, middle, last = [
        Seconds(*(np.full(4, each) for each in times)) for times in ((1.1, 1.0, 0.9), (1, 1.2, 1), (1, 1, 1.4))
    ]
    chunks, hop, ranks = np.where(codes % 2, 2, 4), np.full(4, 0.1), [np.zeros(4), pp - 1.0]
    together = spans(codes, chunks, pp, steps, first, middle, last, hop, steps_overlap=steps_overlap)
    layouts = Layouts.of(pp=pp, num_microbatches=steps)
    held = in_flight_under(codes, chunks, layouts, ranks)
    for code, number in zip(codes, chunks, strict=True):
        alone = span(np.full(4, code), pp, number, steps, first, middle, last, hop, steps_overlap=steps_overlap)
        assert (together[:, code] == alone.seconds).all()
        under = replace(layouts, schedule=np.full(4, code), chunks=np.full(4, number))
        for place, rank in enumerate(ranks):
            assert (held[:, place, code] == in_flight(under, rank)).all()


def test_a_candidate_costs_the_same_alone_as_among_others() -> None:
    tp, pp = np.meshgrid([1, 2, 4, 8], [1, 2, 4, 8])
    columns = {"tp": tp.ravel(), "pp": pp.ravel(), "dp": 64 // (tp * pp).ravel(), "num_microbatches": 16}
    together = ask("8x8xh100", **columns)
    for index in range(16):
        one = ask("8x8xh100", **{name: np.broadcast_to(column, 16)[index] for name, column in columns.items()})
        assert one.seconds[0] == pytest.approx(together.seconds[index])
        assert one.bytes.peak[0] == pytest.approx(together.bytes.peak[index])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_a_pipeline_of_equal_stages_takes_as_long_as_the_simulator_plays(schedule: str, num_microbatches: int) -> None:
    times = StageTimes(forward=1.0, input_gradient=1.1, weight_gradient=0.9)
    chunks = 2 if schedule == "interleaved" else None
    made = lower(make_schedule(schedule, 4, num_microbatches, chunks))
    played = simulate(made, stage_prices(made.placement, [times] * 4)).makespan
    stage = Seconds(*(np.array([value]) for value in (1.0, 1.1, 0.9)))
    found = span(np.array([SCHEDULES.index(schedule)]), 4, chunks or 1, num_microbatches, stage, stage, stage, 0.0)
    assert float(found.seconds[0]) == pytest.approx(played, rel=1e-6)


# How far the closed form of a schedule may be from the simulator, for few microbatches and many.
CLOSE = {**dict.fromkeys(SCHEDULES, 0.09), "1f1b": 1e-6, "gpipe": 1e-6, "interleaved": 1e-6, "looped-bfs": 1e-6,
         "zb-h1": 1e-6, "eager-1f1b": 1e-6, "hanayo": 0.25, "chimera": 0.12}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [2, 4, 8, 16])
def test_every_schedule_is_priced_near_what_the_simulator_plays(schedule: str, num_microbatches: int) -> None:
    entry = CATALOGUE[schedule]
    if num_microbatches < 4 * entry.least_microbatches:
        return
    times = StageTimes(forward=1.0, input_gradient=1.1, weight_gradient=0.9)
    made = make_schedule(schedule, 4, num_microbatches)
    played = simulate(made, stage_prices(made.placement, [times] * 4)).makespan
    stage = Seconds(*(np.array([value]) for value in (1.0, 1.1, 0.9)))
    code = np.array([SCHEDULES.index(schedule)])
    found = span(code, 4, entry.chunks, num_microbatches, stage, stage, stage, 0.0)
    assert float(found.seconds[0]) == pytest.approx(played, rel=CLOSE[schedule])


@pytest.mark.parametrize("schedule", ["v-min", "v-half"])
@pytest.mark.parametrize("passes", [(1.0, 1.3, 1.0), (1.0, 2.0, 1.0), (1.0, 2.0, 0.5), (2.0, 1.0, 1.0)])
def test_patterns_that_do_not_close_up_lose_time_with_every_microbatch(
    schedule: str, passes: tuple[float, float, float]
) -> None:
    made = make_schedule(schedule, 8, 64)
    forward, inputs, weights = passes
    times = StageTimes(forward=forward, input_gradient=inputs, weight_gradient=weights)
    played = simulate(made, stage_prices(made.placement, [times] * 8)).makespan
    stage = Seconds(*(np.array([value]) for value in passes))
    found = span(np.array([SCHEDULES.index(schedule)]), 8, 2, 64, stage, stage, stage, 0.0)
    assert float(found.seconds[0]) == pytest.approx(played, rel=0.03)


@pytest.mark.parametrize(("schedule", "num_hops"), [("1f1b", 2 * (3 + 5)), ("gpipe", 2 * 3)])
def test_hops_cost_what_facts_say(schedule: str, num_hops: int) -> None:
    # facts 1.2: 1F1B pays 2[(p-1) + floor((m-1)(p-1)/p)] hops; p = 4, m = 8.
    stage = Seconds(*(np.ones(1) for _ in range(3)))
    found = span(np.array([SCHEDULES.index(schedule)]), 4, 1, 8, stage, stage, stage, 0.01)
    assert float(found.hops[0]) == pytest.approx(num_hops * 0.01, rel=0.05)


def test_tensor_parallelism_across_nodes_is_slower_than_inside() -> None:
    found = ask("2x8xh100", model="llama3-70b", tp=[8, 16], dp=[2, 1], num_microbatches=[4, 8])
    assert found.parts["tp"][1] > 2 * found.parts["tp"][0]


def test_overlap_hides_gradients_but_not_all() -> None:
    hidden = ask("8x8xh100", dp=64, num_microbatches=4, zero=1)
    plain = ask(
        "8x8xh100",
        dp=64,
        num_microbatches=4,
        zero=1,
        software=Software(overlap_gradients=False, overlap_parameters=False),
    )
    assert 0 < hidden.parts["dp"][0] < plain.parts["dp"][0] / 2


def test_full_recomputation_costs_about_a_forward() -> None:
    none, full = ask("8xh100", dp=8), ask("8xh100", dp=8, recompute=2)
    assert full.parts["recompute"][0] == pytest.approx(none.parts["compute"][0] / 3.2, rel=0.12)


def test_unequal_pools_go_at_the_pace_of_the_slowest_and_must_all_fit() -> None:
    mixed = ask("1x8xh100+1x8xa100-40g", dp=16)
    slow = ask("2x8xa100-40g", dp=16)
    assert mixed.seconds[0] == pytest.approx(slow.seconds[0], rel=0.2)
    assert not mixed.fits[0]
    assert ask("2x8xh200", dp=16, zero=1).fits[0]


def test_layers_by_weight_take_from_the_stage_with_the_head() -> None:
    even, by_weight = (ask("2x8xh100", pp=16, num_microbatches=64, balance=choice) for choice in (0, 2))
    assert by_weight.seconds[0] < even.seconds[0]


def test_a_large_batch_of_candidates_is_priced_at_once() -> None:
    count = 20_000
    tp = np.random.default_rng(0).choice([1, 2, 4, 8], count)
    found = ask("64x8xh100", model="llama3-70b", tp=tp, dp=512 // tp, num_microbatches=4, zero=1)
    assert len(found.seconds) == len(Layouts.of(tp=tp)) == count
    assert np.isfinite(found.seconds).all()


def test_gradients_summed_everywhere_take_longer_than_each_ranks_part_of_them() -> None:
    software = Software(overlap_gradients=False, overlap_parameters=False)
    part = ask("8x8xh100", dp=64, zero=1, software=software).parts["dp"][0]
    whole = ask("8x8xh100", dp=64, zero=1, software=replace(software, scatters_gradients=False)).parts["dp"][0]
    # Two bytes are gathered of each weight; of its gradient four are scattered, or also gathered.
    assert whole == pytest.approx(part * (2 + 4 + 4) / (2 + 4), rel=0.02)


def test_fresh_buffers_cost_time_in_pipelines_whose_memory_is_nearly_full() -> None:
    columns: dict[str, Any] = {"pp": [1, 8, 8], "tp": [8, 1, 1], "microbatch": [1, 1, 6], "num_microbatches": 8}
    plain = ask("8xh100", **columns)
    pressed = ask("8xh100", software=Software(fresh_buffers=True), **columns)
    slower = pressed.seconds / plain.seconds
    used = plain.bytes.peak / (80 * 0.99 * 2**30)
    assert used[1] < CONSTANTS.pressed_from < used[2]
    assert slower[:2].tolist() == [1.0, 1.0]
    assert 1.0 < slower[2] <= 1.0 + CONSTANTS.pressed


def test_shards_come_from_other_nodes_while_rows_go_to_experts_inside_one() -> None:
    def exchanged(ep: int, dispatch_rate: float) -> float:
        layouts = Layouts.of(dp=16, ep=ep, zero=3)
        constants = replace(CONSTANTS, dispatch_rate=dispatch_rate)
        model, cluster = get_model("qwen3-235b-a22b"), Cluster.parse("2x8xh100")
        found = price(model, cluster, layouts, sequence=1024, software=Software(), constants=constants)
        return float(found.parts["dp"][0])

    assert exchanged(8, 0.5) < exchanged(8, 1.0)
    # Over both nodes rows and shards take the same way.
    assert exchanged(16, 0.5) == exchanged(16, 1.0)
