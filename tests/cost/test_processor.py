"""Steps on processors: calls, work and bytes add up, and nothing of GPUs is in it."""

from dataclasses import replace

import pytest

from shardwise.cluster.catalogue import get_device
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.file import from_toml, to_toml
from shardwise.cluster.kernel import KINDS, Kernel, get_kernel
from shardwise.cost.constants import CONSTANTS
from shardwise.cost.layouts import Layouts
from shardwise.cost.play import play, share_layers
from shardwise.cost.processor import constants_on
from shardwise.cost.software import Software
from shardwise.cost.stage import Pricer, add
from shardwise.cost.step import price
from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import get_model
from shardwise.model.model import Block
from shardwise.model.operations import Attention, Matmul, Width
from shardwise.model.share import Share
from tests.cost.priced import ask

SHARE = Share(sequence=128, microbatch=4, width=4)


def pricer_with(**rates: float) -> Pricer:
    """Every kind takes no time, but for what is said: seconds of one unit of it."""
    kernels = tuple(Kernel(kind=kind, forward=1e30, backward=1e30) for kind in KINDS if kind not in rates)
    kernels += tuple(Kernel(kind=kind, forward=1 / rate, backward=2 / rate) for kind, rate in rates.items())
    pool = Cluster.parse("2xcpu").pools[0]
    pool = replace(pool, device=replace(pool.device, kernels=kernels))
    software = Software(precision="fp32")
    return Pricer(model=get_model("gpt2"), pool=pool, software=software, constants=CONSTANTS, sequence=128)


def test_a_matmul_takes_its_flops_at_the_measured_rate_whatever_its_shape() -> None:
    operation = Matmul(name="linear", inputs=Width(64), outputs=(Width(96),))
    found = pricer_with(matmul=1e-9).engine.operation(operation, SHARE)
    assert float(found.forward) == pytest.approx(2 * 512 * 64 * 96 * 1e-9)
    assert float(found.input) == float(found.weight) == pytest.approx(512 * 64 * 96 * 1e-9)


def test_scores_are_paid_for_once_each_however_long_a_head_is_and_masked_ones_too() -> None:
    engine = pricer_with(scores=1e-6).engine
    for head in (32, 128):
        operation = Attention(name="attention", heads=4, kv_heads=4, qk_dim=head, v_dim=head)
        assert float(engine.operation(operation, SHARE).forward) == pytest.approx(4 * 4 * 128 * 128 * 1e-6)


def test_masks_are_paid_for_by_score_where_rows_have_documents() -> None:
    pricer, operation = pricer_with(masks=1e-6), Attention(name="a", heads=4, kv_heads=4, qk_dim=32, v_dim=32)
    masked = replace(pricer, software=replace(pricer.software, masks_documents=True))
    assert float(masked.engine.operation(operation, SHARE).forward) == pytest.approx(4 * 4 * 128 * 128 * 1e-6)
    assert float(pricer.engine.operation(operation, SHARE).forward) < 1e-9


def test_an_optimizer_is_called_for_every_tensor_of_its_stage() -> None:
    parts = []
    for call in (0.0, 1e-3):
        pricer = pricer_with()
        called = replace(get_kernel(pricer.pool.device.kernels, "optimizer"), forward_call=call)
        others = tuple(each for each in pricer.pool.device.kernels if each.kind != "optimizer")
        pool = replace(pricer.pool, device=replace(pricer.pool.device, kernels=(called, *others)))
        layouts = Layouts.of(dp=[2, 1], pp=[1, 2])
        parts.append(price(pricer.model, Cluster(pools=(pool,)), layouts, sequence=128).parts["optimizer"])
    num_tensors = sum(len(block.parameters) for block in get_model("gpt2").blocks)
    assert (parts[1] - parts[0]).tolist() == pytest.approx([1e-3 * num_tensors, 1e-3 * num_tensors / 2])


def test_calls_add_to_the_work_and_projections_are_called_one_by_one() -> None:
    pricer = pricer_with()
    called = replace(get_kernel(pricer.pool.device.kernels, "matmul"), forward_call=1e-3, backward_call=2e-3)
    others = tuple(each for each in pricer.pool.device.kernels if each.kind != "matmul")
    pool = replace(pricer.pool, device=replace(pricer.pool.device, kernels=(called, *others)))
    operation = Matmul(name="qkv", inputs=Width(64), outputs=(Width(64), Width(64), Width(64)))
    block = Block(
        kind="layer", operations=(operation,), parameters=(), stack="layers", input_elements=64, output_elements=64
    )
    found = replace(pricer, pool=pool).engine.block(block, SHARE)
    assert [round(float(each), 6) for each in found] == [3e-3, 3e-3, 3e-3]


def test_a_layer_that_is_cut_takes_longer_to_call_however_many_projections_it_has() -> None:
    pricer = pricer_with()
    cut = Kernel(kind="sharded", forward=1e30, backward=1e30, forward_call=1e-3, backward_call=2e-3)
    others = tuple(each for each in pricer.pool.device.kernels if each.kind != "sharded")
    pool = replace(pricer.pool, device=replace(pricer.pool.device, kernels=(cut, *others)))
    engine, shared = replace(pricer, pool=pool).engine, (Width(64), Width(64), Width(64))
    whole, part = (Matmul(name="qkv", inputs=Width(64), outputs=shared, sharding=how) for how in ("none", "column"))
    for operation, tp, calls in ((part, 2, 1), (part, 1, 0), (whole, 2, 0)):
        found = engine.operation(operation, replace(SHARE, tp=tp))
        assert [round(float(each), 6) for each in found] == [calls * 1e-3, calls * 2e-3, 0.0]


def test_what_was_fitted_on_gpus_is_left_out_on_processors_alone() -> None:
    cpu, gpu = (Cluster.parse(name).pools[0] for name in ("2xcpu", "2xh100"))
    assert constants_on(gpu, CONSTANTS) is CONSTANTS
    found = constants_on(cpu, CONSTANTS)
    assert (found.sync_seconds, found.exchange_rate, found.gather_rate) == (0.0, 1.0, 1.0)
    assert found.step_seconds < CONSTANTS.step_seconds


def test_a_meeting_is_paid_for_at_every_sum_hop_gather_and_exchange() -> None:
    pricer = pricer_with()
    layouts = Layouts.of(dp=[1, 2, 2, 2, 1, 1], zero=[0, 0, 1, 3, 0, 0], tp=[1, 1, 1, 1, 2, 1], pp=[1, 1, 1, 1, 1, 2])
    found = []
    for seconds in (0.0, 1e-3):
        others = tuple(each for each in pricer.pool.device.kernels if each.kind != "meeting")
        meeting = Kernel(kind="meeting", forward=1e30, backward=1e30, forward_call=seconds)
        pool = replace(pricer.pool, device=replace(pricer.pool.device, kernels=(*others, meeting)))
        found.append(price(pricer.model, Cluster(pools=(pool,)), layouts, sequence=128))
    longer = found[1].seconds - found[0].seconds
    blocks = pricer.model.blocks
    num_sums = 2 * sum(block.num_reductions for block in blocks)
    # One rank meets nobody; of gradients, and with ZeRO of weights, there is one; ZeRO-3 has three for each layer and
    # for the ends; one microbatch passes a stage forward and backward.
    expected = [0, 1, 2, 3 * (pricer.model.num_layers + 1), num_sums, 2]
    assert longer.tolist() == pytest.approx([1e-3 * each for each in expected])


def test_backwards_in_halves_take_longer_on_all_stages_but_the_first() -> None:
    """The first has no input whose gradient a rank waits for. An account plays the schedule: with closed forms alone,
    what was measured had no effect on it."""
    plain = pricer_with(matmul=1e-9)
    others = [each for each in plain.pool.device.kernels if each.kind != "halves"]
    halves = Kernel(kind="halves", forward=1e30, backward=1 / 1.5, backward_call=1e-3)
    pool = replace(plain.pool, device=replace(plain.pool.device, kernels=(*others, halves)))
    split, layouts = replace(plain, pool=pool), Layouts.of(pp=2, num_microbatches=4)
    stages = share_layers(plain.model.num_layers, (0, 1), 0.0, 0.0)
    found = {
        (name, each is split): play(each, layouts, name, None, stages, each.pieces(layouts))
        for name in ("1f1b", "zb-h1")
        for each in (plain, split)
    }
    assert found["1f1b", True] == found["1f1b", False]
    whole, longer = found["zb-h1", False], found["zb-h1", True]
    assert whole is not None
    assert longer is not None
    pieces = plain.pieces(layouts)
    last = add(*[pieces.kinds[0]] * stages[1], pieces.end)
    num_cuts = 8 * stages[1] + 2  # Six matmuls and two norms of a layer; the last norm and the head.
    expected = 0.5 * float((last.input + last.weight)[0]) + 1e-3 * num_cuts
    assert longer.work - whole.work == pytest.approx(4 * expected)
    assert longer.seconds > whole.seconds


def test_bytes_move_beside_the_compute_only_where_there_are_spare_cores() -> None:
    pool = Cluster.parse("2xcpu").pools[0]
    for cores, hidden in ((2, 0.0), (3, CONSTANTS.dp_hidden / 2), (64, CONSTANTS.dp_hidden)):
        sized = replace(pool, node=replace(pool.node, host=replace(pool.node.host, num_cores=cores)))
        assert constants_on(sized, CONSTANTS).dp_hidden == pytest.approx(hidden)


def test_half_a_core_takes_twice_as_long() -> None:
    whole = get_device("cpu").kernels
    halves = tuple(each.taking_turns(0.5) for each in whole)
    assert halves[0].forward == whole[0].forward / 2
    assert halves[0].forward_call == whole[0].forward_call * 2


def test_more_rows_take_longer_and_less_than_in_proportion() -> None:
    one, two = (
        float(ask("2xcpu", model="gpt2", sequence=256, dp=2, microbatch=rows).parts["compute"][0]) for rows in (1, 2)
    )
    assert 1.5 * one < two < 2 * one


def test_kernels_come_back_from_a_file_and_what_is_wrong_there_is_named() -> None:
    cluster = Cluster.parse("2xcpu")
    text = to_toml(cluster)
    assert from_toml(text) == cluster
    with pytest.raises(ShardwiseError, match="kind of a kernel"):
        from_toml(text.replace('kind = "norm"', 'kind = "norms"'))
    with pytest.raises(ShardwiseError, match="no elementwise"):
        from_toml('[[pool]]\ndevice = "cpu"\n[[pool.kernel]]\nkind = "norm"\nforward = 1.0\nbackward = 1.0\n')
