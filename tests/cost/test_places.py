"""What stands on which rank: typical ranks, every rank, and schedules played against closed forms."""

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.constants import CONSTANTS
from shardwise.cost.layouts import CONTEXT, ORDERS, RECOMPUTE, Layouts
from shardwise.cost.pipeline import SCHEDULES
from shardwise.cost.places import rank_places, typical_places
from shardwise.cost.play import play, share_layers, short_schedule
from shardwise.cost.software import Software
from shardwise.cost.stage import Pricer
from shardwise.cost.step import price
from shardwise.model.catalogue import get_model
from shardwise.planner import plan as plans
from shardwise.schedule.catalogue import make_schedule
from tests.cost.priced import ask

LLAMA = get_model("llama3-8b")


def pricer(cluster: str = "8xh100") -> Pricer:
    pool = Cluster.parse(cluster).pools[0]
    return Pricer(model=LLAMA, pool=pool, software=Software(), constants=CONSTANTS, sequence=4096)


def test_a_plan_and_a_layout_count_by_the_same_words() -> None:
    assert (RECOMPUTE, CONTEXT, ORDERS) == (plans.RECOMPUTE, plans.CONTEXT, plans.ORDERS)


@pytest.mark.parametrize(("layers", "stages", "begin", "end"), [(32, 4, 0.1, 3.0), (126, 16, 0.0, 1.4), (10, 10, 2, 2)])
def test_layers_are_shared_out_whole_and_no_stage_goes_without(
    layers: int, stages: int, begin: float, end: float
) -> None:
    shared = share_layers(layers, range(stages), begin, end)
    assert sum(shared) == layers
    assert min(shared) >= 1
    assert max(shared[1:-1], default=1) - min(shared[1:-1], default=1) <= 1


def test_a_stage_with_a_heavy_head_has_fewer_layers() -> None:
    assert share_layers(32, range(4), 0.0, 4.0) == (9, 9, 9, 5)


def test_ranks_and_not_stages_are_balanced_where_a_rank_has_several() -> None:
    shared = share_layers(34, (0, 1, 2, 3, 3, 2, 1, 0), 0.0, 2.0)
    assert [shared[rank] + shared[7 - rank] for rank in range(4)] == [7, 9, 9, 9]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v", "eager-1f1b"])
def test_ranks_hold_no_more_microbatches_than_closed_forms_say(name: str) -> None:
    schedule = short_schedule(name, 4, 12, None)
    stages = schedule.placement.num_stages
    places = rank_places(LLAMA, share_layers(32, schedule.placement.ranks, 0, 0), schedule, 12)
    layouts = Layouts.of(pp=4, chunks=stages // 4, num_microbatches=12, schedule=SCHEDULES.index(name), balance=0)
    typical = typical_places(LLAMA, layouts, pricer().stages(layouts).dealt)
    assert places.kept_layers.sum(axis=2).max() <= typical.kept_layers.sum(axis=2).max() * 1.13
    assert places.layers.sum() == 32
    assert places.begins.sum() == places.ends.sum() == 1


def test_a_model_that_is_held_twice_is_counted_twice() -> None:
    schedule = short_schedule("dualpipe", 4, 16, None)
    places = rank_places(LLAMA, (8, 8, 8, 8), schedule, 16)
    assert places.layers.sum() == 64
    assert places.begins.tolist() == places.ends.tolist() == [[1, 0, 0, 1]]
    layouts = Layouts.of(pp=4, chunks=2, num_microbatches=16, schedule=SCHEDULES.index("dualpipe"), balance=0)
    typical = typical_places(LLAMA, layouts, pricer().stages(layouts).dealt)
    assert typical.layers[0, 0].sum() == 16


def test_a_schedule_that_holds_all_holds_those_of_the_whole_step() -> None:
    places = rank_places(LLAMA, (8, 8, 8, 8), short_schedule("gpipe", 4, 64, None), 64)
    assert places.kept_layers[0, 0].sum() == 8 * 64


@pytest.mark.parametrize("num_microbatches", [16, 61, 128])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("gpipe", None)])
def test_a_long_step_is_played_as_if_it_were_played_whole(name: str, chunks: int | None, num_microbatches: int) -> None:
    layouts = Layouts.of(pp=4, num_microbatches=num_microbatches, chunks=chunks or 1)
    stages = share_layers(32, [stage % 4 for stage in range(4 * (chunks or 1))], 0.1, 2.0)
    played = play(pricer(), layouts, name, chunks, stages, pricer().pieces(layouts))
    assert played is not None
    short = Layouts.of(pp=4, num_microbatches=num_microbatches + 4, chunks=chunks or 1)
    longer = play(pricer(), short, name, chunks, stages, pricer().pieces(short))
    assert longer is not None
    # Four microbatches more take as long as four of the busiest rank, and no less.
    assert longer.seconds - played.seconds >= (longer.work - played.work) * (1 - 1e-9)
    assert longer.seconds - played.seconds <= (longer.work - played.work) * 1.05


def test_data_outermost_brings_stages_together_and_replicas_apart() -> None:
    from shardwise.cost.step import price

    layouts = Layouts.of(dp=8, pp=8, num_microbatches=16, order=[0, 1], zero=1)
    found = price(LLAMA, Cluster.parse("8x8xh100"), layouts, sequence=4096)
    assert found.parts["hops"][1] < found.parts["hops"][0] / 4
    assert found.parts["dp"][1] > found.parts["dp"][0]


def test_groups_of_replicas_exchange_less_between_nodes_and_hold_more() -> None:
    from shardwise.cost.step import price

    layouts = Layouts.of(dp=64, zero=3, zero_group=[0, 8], microbatch=1)
    # With eight NICs a node the network of H100s is as fast as their links: nothing to gain there.
    found = price(LLAMA, Cluster.parse("8x8xl40s"), layouts, sequence=4096)
    assert found.parts["dp"][1] < found.parts["dp"][0]
    assert found.bytes.peak[1] > found.bytes.peak[0]


def test_experts_that_no_other_rank_has_are_not_gathered_under_zero_3() -> None:
    from shardwise.cost.step import price

    layouts = Layouts.of(dp=64, ep=[1, 64], zero=3, microbatch=1)
    found = price(get_model("gpt-oss-120b"), Cluster.parse("8x8xh100"), layouts, sequence=4096)
    # 117 billion parameters over a node's 400 GB/s, twice, and their gradients; or the dense 2 billion alone.
    assert found.parts["dp"][0] > 1.0
    assert found.parts["dp"][1] < 0.1 * found.parts["dp"][0]


def test_all_to_all_waits_for_what_a_ring_hides() -> None:
    from shardwise.cost.step import price

    layouts = Layouts.of(cp=8, context=[0, 1], microbatch=1)
    pool = Cluster.parse("8xh100").pools[0]
    waits = []
    for rate in (450e9, 225e9):
        link = replace(pool.node.link, name="unmeasured", bytes_per_second=rate)
        slower = Cluster(pools=(replace(pool, node=replace(pool.node, link=link)),))
        waits.append(price(LLAMA, slower, layouts, sequence=65536).parts["cp"])
    (ring, exchange), (ring_on_slower, exchange_on_slower) = waits
    # A ring merges pieces on the device, and that is all that it takes here, however fast the links are.
    assert ring == ring_on_slower > 0
    assert exchange_on_slower > 1.5 * exchange


def test_a_ring_waits_where_attention_is_short_and_not_where_it_is_long() -> None:
    layouts = Layouts.of(cp=[1, 2, 8], microbatch=1)
    found = price(LLAMA, Cluster.parse("8xh100"), layouts, sequence=1024)
    # A layer waits once forward and twice backward, and keys and values of 512 positions hide next to nothing.
    waits = LLAMA.num_layers * 3 * CONSTANTS.sync_seconds
    assert 0.7 * waits < found.parts["cp"][1] < 1.5 * waits
    # Thirteen kernels of each of seven pieces more, in both passes: the processor launches them one by one.
    launched = 7 * 13 * CONSTANTS.launch_seconds * LLAMA.num_layers * 2
    assert found.parts["compute"][2] > launched
    long = price(LLAMA, Cluster.parse("8xh100"), layouts, sequence=131072)
    assert (long.parts["cp"][1:] < 0.05 * long.seconds[1:]).all()


def test_what_is_offloaded_costs_the_copies_that_compute_does_not_hide() -> None:
    from shardwise.cost.step import price

    layouts = Layouts.of(dp=8, zero=1, offload_parameters=[0, 1, 0], offload_activations=[0, 0, 1], microbatch=1)
    found = price(LLAMA, Cluster.parse("8xh100"), layouts, sequence=512)
    assert found.parts["offload"][0] == 0
    assert found.parts["offload"][1] > 0
    assert found.bytes.peak[1] < found.bytes.peak[0]
    assert found.bytes.peak[2] < found.bytes.peak[0]


def test_experts_are_whole_over_tensor_parallel_ranks_or_cut_over_them() -> None:
    """Megatron shares them out over tp too; our engine cuts each, and has fewer replicas of it."""
    whole = ask("8xh100", model="mixtral-8x7b", tp=2, dp=4, ep=4, zero=1)
    ours = ask("8xh100", model="mixtral-8x7b", tp=2, dp=4, ep=4, zero=1, software=Software(cuts_experts=True))
    assert ours.bytes.parts["gradients"].max() == pytest.approx(whole.bytes.parts["gradients"].max() / 2, rel=0.1)
    # States are shared out over all that hold the same: as many bytes either way.
    assert ours.bytes.parts["optimizer"].max() == pytest.approx(whole.bytes.parts["optimizer"].max(), rel=0.01)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-min", "zb-h2", "zb-v"])
def test_what_is_too_long_to_be_played_shows_soon_what_ranks_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cost.play._MOST_FORWARDS", 0)
    few, more = short_schedule(name, 7, 56, None), make_schedule(name, 7, 28)
    assert few.num_microbatches < more.num_microbatches
    layers = share_layers(32, few.placement.ranks, 0.1, 1.7)
    soon, later = rank_places(LLAMA, layers, few, 56), rank_places(LLAMA, layers, more, 56)
    assert all((one == other).all() for one, other in zip(soon, later, strict=True))


def test_dense_layers_at_the_beginning_are_priced_where_they_are() -> None:
    model = get_model("deepseek-v2-lite")
    layouts = Layouts.of(dp=8, pp=3, ep=8, num_microbatches=16, zero=1, balance=0)
    cluster = Cluster.parse("3x8xh100")
    found = price(model, cluster, layouts, sequence=4096)
    deep = replace(pricer(), model=model, pool=cluster.pools[0], sequence=4096)
    played = play(deep, layouts, "1f1b", None, (9, 9, 9), deep.pieces(layouts))
    inside = sum(found.parts[name][0] for name in ("compute", "tp", "ep", "bubble", "hops"))
    assert played is not None
    assert inside == pytest.approx(played.seconds, rel=0.01)
    assert typical_places(model, layouts, deep.stages(layouts).dealt).layers[0].tolist() == [[1, 8], [0, 9], [0, 9]]
