"""Bytes of a rank: Korthikanti's figures to every digit, ZeRO's table, and what grows with what."""

from typing import Any

import numpy as np
import pytest

from shardwise.cluster.catalogue import get_device
from shardwise.cost.deal import Deal
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import DEFERRED_FREE_BYTES, NUM_STAGING_BUFFERS, STAGING_BYTES, saved, step_bytes
from shardwise.cost.pipeline import SCHEDULES
from shardwise.cost.places import Places, count_blocks, in_flight, typical_places
from shardwise.cost.software import Software
from shardwise.cost.stage import share_of
from shardwise.model.describe import Sizes, describe
from shardwise.model.model import Model
from shardwise.planner.question import usual_software
from tests.cost.priced import ask

GIB = 2**30
MEGATRON = Software(precision="fp16", attention="megatron")

# facts 4.1: layers, hidden, heads, microbatch, pp, chunks; activations of the first stage in GiB, nothing recomputed
# without sequence parallelism, and scores recomputed with it.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 4, 1, 1, 59.25, 9.5625),
    "175B": (96, 12288, 96, 1, 8, 3, 66.84375, 12.3515625),
    "530B": (105, 20480, 128, 1, 35, 3, 114.0234, 23.0762),
    "1T": (128, 25600, 160, 1, 64, 1, 131.25, 26.5625),
}


def gpt(layers: int, hidden: int, heads: int) -> Model:
    return describe("gpt", Sizes(layers=layers, hidden=hidden, heads=heads, vocabulary=51200, dropout=True))


@pytest.mark.parametrize("name", KORTHIKANTI)
@pytest.mark.parametrize("selective", [False, True])
def test_activations_are_korthikantis_to_every_digit(name: str, selective: bool) -> None:
    layers, hidden, heads, microbatch, pp, chunks, plain, chosen = KORTHIKANTI[name]
    model = gpt(layers, hidden, heads)
    layouts = Layouts.of(
        tp=8,
        pp=pp,
        chunks=chunks,
        microbatch=microbatch,
        num_microbatches=1000,
        sequence_parallel=selective,
        schedule=SCHEDULES.index("interleaved" if chunks > 1 else "1f1b"),
    )
    block = next(block for block, _ in model.kinds if block.stack)
    share = share_of(layouts, 2048, MEGATRON)
    kept = saved(block, share, MEGATRON, ("core_attention",) if selective else "none")
    held = in_flight(layouts, np.zeros(1)) * layers / pp * kept / GIB
    assert float(held[0]) == pytest.approx(chosen if selective else plain, rel=2e-6)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "batch", "num_gpus", "seconds", "mfu"),
    [
        ("22B", 48, 6144, 64, 4, 8, 1.10, 41.7),
        ("175B", 96, 12288, 96, 64, 64, 13.75, 51.4),
        ("530B", 105, 20480, 128, 280, 280, 37.83, 56.0),
        ("1T", 128, 25600, 160, 512, 512, 71.49, 56.3),
    ],
)
def test_mfu_of_the_measured_steps_is_korthikantis(
    name: str, layers: int, hidden: int, heads: int, batch: int, num_gpus: int, seconds: float, mfu: float
) -> None:
    # facts 5: the formula 72BsLh^2(1 + s/6h + V/12Lh), attention counted in full, at 312 TFLOP/s.
    model = gpt(layers, hidden, heads)
    share = share_of(Layouts.of(microbatch=1), 2048, MEGATRON)
    flops = float(np.asarray(model.flops(share).total).max()) * batch
    assert round(100 * flops / (seconds * num_gpus * 312e12), 1) == mfu, name


@pytest.mark.parametrize(
    ("zero", "per_parameter"),
    [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 14 / 64)],
)
def test_states_are_spread_as_zero_says(zero: int, per_parameter: float) -> None:
    # facts 4.2, 2-byte gradients; under ZeRO-3 the masters are the shards, so 2 of the 16 bytes are not there.
    found = ask("8x8xh100", dp=64, zero=zero, software=Software(gradient_bytes=2))
    names = ("weights", "gradients", "optimizer", "masters")
    states = sum(found.bytes.parts[name][0, 0] for name in names)
    layouts = Layouts.of(dp=64, zero=zero)
    model_bytes = states / count_blocks(_llama(), layouts, whole_model(layouts)).dense[0, 0]
    assert model_bytes == pytest.approx(per_parameter)


def test_casts_of_gathered_weights_are_whole_where_they_are_saved_for_the_backward() -> None:
    plain, engines = (ask("8xh100", dp=8, zero=3, software=Software(saves_casts=saves)) for saves in (False, True))
    layouts = Layouts.of(dp=8, zero=3)
    numbers = count_blocks(_llama(), layouts, whole_model(layouts)).dense[0, 0]
    assert plain.bytes.parts["weights"].max() == 0
    assert engines.bytes.parts["weights"].max() == pytest.approx(2 * numbers)
    assert engines.bytes.parts["masters"].max() == pytest.approx(4 * numbers / 8)


def test_weights_are_held_as_two_ranks_of_the_engine_held_them() -> None:
    """Bytes of a parameter over two replicas, counted on CPU ranks in bf16 of a module in bf16 and of one in fp32."""
    sixteen, wide = (usual_software(get_device("h100"), is_wide=is_wide) for is_wide in (False, True))
    for software, zero, weights, masters in ((sixteen, 1, 2, 2), (sixteen, 3, 1, 2), (wide, 1, 2, 4), (wide, 3, 2, 2)):
        parts = ask("2xh100", dp=2, zero=zero, software=software).bytes.parts
        numbers = count_blocks(_llama(), Layouts.of(dp=2), whole_model(Layouts.of(dp=2))).dense[0, 0]
        assert parts["weights"].max() == pytest.approx(weights * numbers)  # Of the wide one, what is cast of them.
        assert parts["masters"].max() == pytest.approx(masters * numbers)


@pytest.mark.parametrize(("zero", "passes", "step"), [(0, 2, 4), (1, 2, 4 / 8), (2, 2 / 8, 4 / 8), (3, 2 / 8, 4 / 8)])
def test_gradients_of_16_bit_weights_are_in_16_bits_until_the_step(zero: int, passes: float, step: float) -> None:
    """The peak is the larger of two moments: both passes with their activations, or the step with fp32 gradients."""
    ours = usual_software(get_device("h200"))
    numbers = count_blocks(_llama(), Layouts.of(dp=8), whole_model(Layouts.of(dp=8))).dense[0, 0]
    long = ask("8xh200", dp=8, zero=zero, microbatch=4, software=ours).bytes
    assert long.parts["gradients"].max() == pytest.approx(passes * numbers)  # Activations are more than the copies.
    assert long.beyond_passes.max() == 0
    short = ask("8xh200", dp=8, zero=zero, microbatch=1, recompute=2, sequence=16, software=ours).bytes
    freed = sum(short.parts.get(name, np.zeros(())) for name in ("activations", "recomputed", "loss", "gathered"))
    assert short.parts["gradients"] == pytest.approx(passes * numbers + np.maximum(step * numbers - freed, 0.0))
    wide = ask("8xh200", dp=8, zero=zero, software=usual_software(get_device("h200"), is_wide=True)).bytes
    assert wide.parts["gradients"].max() == pytest.approx(2 * passes * numbers)
    assert wide.widened is None


def test_what_can_leave_the_device_takes_the_copies_of_gradients_along() -> None:
    """An offload is chosen by what it frees. Freed activations do not help if the step needs their memory."""
    ours = usual_software(get_device("h200"))
    cases: list[dict[str, Any]] = [{"microbatch": 4}, {"recompute": 2, "sequence": 16}]
    for more in cases:
        held = ask("1xh200", software=ours, **more).bytes
        for shares in ((0.5, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.5, 0.5), (0.0, 1.0, 0.0)):
            names = ("offload_optimizer", "offload_parameters", "offload_activations")
            away: dict[str, Any] = dict(zip(names, shares, strict=True))
            left = ask("1xh200", software=ours, **more, **away).bytes
            states = ("weights", "masters", "gradients", "optimizer", "activations", "recomputed", "loss")
            before, after = (sum(each.parts[name].max() for name in states) for each in (held, left))
            # Less is freed: some of it is staged on the device.
            assert before - held.movable(*shares).max() <= after * (1 + 1e-9)


def whole_model(layouts: Layouts) -> Places:
    """All 32 layers on one rank."""
    layers = np.array([32.0])
    return typical_places(_llama(), layouts, Deal(layers, layers, layers, np.zeros(1)))


def _llama() -> Model:
    from shardwise.model.catalogue import get_model

    return get_model("llama3-8b")


def test_gradients_of_a_stage_that_stays_gathered_are_whole_in_the_precision_of_their_sum() -> None:
    def gradients(reduce_bytes: int, pp: int) -> float:
        software = Software(shards_parameters=True, reduce_bytes=reduce_bytes)
        held = ask("2x8xh100", dp=16 // pp, pp=pp, zero=3, num_microbatches=4, software=software).bytes
        return float(held.parts["gradients"][0, 0])

    assert gradients(4, pp=1) == gradients(2, pp=1)
    # A first stage of two has half of the layers, and the embedding: 4.0 of 8.0 billion numbers.
    assert gradients(4, pp=2) - gradients(2, pp=2) == pytest.approx(2 * 4.015e9, rel=1e-3)


def test_a_first_stage_holds_a_microbatch_for_every_stage_below() -> None:
    layouts = Layouts.of(pp=4, num_microbatches=[2, 8], schedule=SCHEDULES.index("1f1b"))
    assert in_flight(layouts, np.zeros(2)).tolist() == [2, 4]
    assert in_flight(layouts, np.full(2, 3.0)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("schedule", "chunks", "peak"),
    [("gpipe", 1, 8), ("interleaved", 2, 11 / 2), ("zb-h1", 1, 4), ("zb-h2", 1, 7), ("zb-v", 2, 4), ("v-half", 2, 3)],
)
def test_schedules_hold_what_facts_say_for_four_ranks_and_eight_microbatches(
    schedule: str, chunks: int, peak: float
) -> None:
    layouts = Layouts.of(pp=4, chunks=chunks, num_microbatches=8, schedule=SCHEDULES.index(schedule))
    assert in_flight(layouts, np.zeros(1))[0] == peak


def test_recomputation_trades_activations_for_a_working_set() -> None:
    none, selective, full = (ask("8xh100", dp=8, recompute=choice).bytes for choice in (0, 1, 2))
    assert full.parts["activations"][0, 0] < selective.parts["activations"][0, 0] <= none.parts["activations"][0, 0]
    assert full.parts["recomputed"][0, 0] > none.parts["recomputed"][0, 0] == 0
    assert full.peak[0] < none.peak[0]


def test_what_is_offloaded_is_on_the_host() -> None:
    here, half = ask("8xh100", dp=8, zero=1), ask("8xh100", dp=8, zero=1, offload_optimizer=0.5)
    moved = here.bytes.parts["optimizer"] / 2
    staged = NUM_STAGING_BUFFERS * STAGING_BYTES
    assert moved.max() > staged
    assert half.bytes.parts["optimizer"] == pytest.approx(moved + staged)
    assert half.bytes.parts["masters"] == pytest.approx(here.bytes.parts["masters"])
    assert here.bytes.host[0] == 0
    assert half.bytes.host[0] == pytest.approx(moved.max())
    assert half.seconds[0] >= here.seconds[0]  # States that come beside the last backward may cost nothing.


def test_what_forwards_save_leaves_by_and_by() -> None:
    # What leaves is what autograd saves, operation by operation.
    plain = Software(fused=False, fused_norms=False)
    here, away = ask("8xh100", dp=8, software=plain), ask("8xh100", dp=8, offload_activations=1.0)
    saved = here.bytes.parts["activations"].max()
    assert saved > DEFERRED_FREE_BYTES
    assert away.bytes.parts["activations"].max() == pytest.approx(DEFERRED_FREE_BYTES)
    # Of 14 bytes of a logit at the worst moment 4 are saved: the logarithm of its softmax.
    logits = here.bytes.parts["loss"].max() * 4 / 14
    assert away.bytes.host[0] == pytest.approx(saved + logits)


def test_with_weights_goes_all_that_belongs_to_them() -> None:
    here, away = ask("8xh100", pp=2), ask("8xh100", pp=2, offload_parameters=1.0)
    masters, gradients, state = (here.bytes.parts[name] for name in ("masters", "gradients", "optimizer"))
    assert away.bytes.host == pytest.approx((masters + gradients + state).max(axis=1))
    # Two layers and the ends are there while they are used; and what was cast of them, until a backward has used it.
    assert 0 < away.bytes.parts["masters"].max() < here.bytes.parts["masters"].max()
    assert away.bytes.parts["weights"] == pytest.approx(here.bytes.parts["weights"])
    assert away.bytes.parts["gradients"].max() == pytest.approx(DEFERRED_FREE_BYTES)
    half = ask("8xh100", pp=2, offload_parameters=0.5, offload_optimizer=0.2)
    assert half.bytes.host == pytest.approx(away.bytes.host / 2)
    assert half.seconds[0] > here.seconds[0]


@pytest.mark.parametrize(
    ("zero", "bytes_of_a_number"), [(0, 4 + 4 + 8), (1, 4 + 4 + 8 / 8), (2, 4 + 4 / 8 + 8 / 8), (3, (4 + 4 + 8) / 8)]
)
def test_on_the_host_weights_are_whole_or_in_shards_as_zero_has_them(zero: int, bytes_of_a_number: float) -> None:
    numbers = ask("8xh100", dp=8).bytes.parts["masters"].max() / 4
    away = ask("8xh100", dp=8, zero=zero, offload_parameters=1.0)
    assert away.bytes.host[0] == pytest.approx(numbers * bytes_of_a_number)
    # What was cast of weights stays for the backward, gathered or not.
    assert away.bytes.parts["weights"].max() == pytest.approx(2 * numbers)
    assert away.bytes.peak[0] < ask("8xh100", dp=8).bytes.peak[0]


@pytest.mark.parametrize(
    ("zero", "bytes_of_a_number"),
    [(0, 2 + 4 + 2 + 8), (1, 2 + 4 / 2 + 2 + 8 / 2), (2, 2 + 4 / 2 + 2 / 2 + 8 / 2), (3, (2 + 4 + 2 + 8) / 2)],
)
def test_16_bit_weights_are_on_the_host_beside_their_masters(zero: int, bytes_of_a_number: float) -> None:
    """As two ranks of the engine held them; on the device there are layers in transit, and no casts."""
    ours = usual_software(get_device("h100"))
    numbers = ask("2xh100", dp=2, software=ours).bytes.parts["masters"].max() / 4
    away = ask("2xh100", dp=2, zero=zero, offload_parameters=1.0, software=ours).bytes
    assert away.host[0] == pytest.approx(numbers * bytes_of_a_number)
    assert away.parts["weights"].max() < 2 * numbers / 5
    assert away.parts["masters"].max() < 4 * numbers / 10
    assert away.beyond_passes.max() == 0


def test_the_last_stage_has_the_logits_and_the_first_the_most_activations() -> None:
    parts = ask("8xh100", pp=8, num_microbatches=16).bytes.parts
    assert parts["loss"][0].tolist()[:2] == [0, 0]
    assert parts["loss"][0, 2] > 0
    assert parts["activations"][0, 0] > parts["activations"][0, 1] > parts["activations"][0, 2]


def test_many_layouts_are_counted_at_once_as_one_by_one() -> None:
    tp = [1, 2, 4, 8]
    together = ask("8xh100", tp=tp, sequence_parallel=True).bytes.peak
    alone = [ask("8xh100", tp=one, sequence_parallel=True).bytes.peak[0] for one in tp]
    assert together.tolist() == pytest.approx(alone)


def test_bytes_need_no_cluster_only_a_device() -> None:
    layouts = Layouts.of()

    held = step_bytes(_llama(), get_device("cpu"), layouts, whole_model(layouts), sequence=128)
    assert "context" not in held.parts
    assert held.fullest == ["first"]
