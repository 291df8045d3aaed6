"""FLOPs against the published closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from shardwise.model.catalogue import CATALOGUE, get_model
from shardwise.model.describe import Experts, Sizes, describe
from shardwise.model.flops import flops, gemm, num_pairs
from shardwise.model.model import Model
from shardwise.model.operations import Attention, Matmul, Operation
from shardwise.model.share import Share

# Korthikanti et al. 2022, table 5: hidden, heads, layers, batch, GPUs, seconds of a step with sequence parallelism and
# selective recomputation, and the published MFU of an A100 of 312 TFLOP/s, in percent.
STEPS = {
    "22B": (6144, 64, 48, 4, 8, 1.10, 41.7),
    "175B": (12288, 96, 96, 64, 64, 13.75, 51.4),
    "530B": (20480, 128, 105, 280, 280, 37.83, 56.0),
    "1T": (25600, 160, 128, 512, 512, 71.49, 56.3),
}


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Model:
    return describe("gpt", Sizes(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary))


def operation(model: Model, kind: str, name: str) -> Operation:
    block = {block.kind: block for block, _ in model.kinds}[kind]
    return next(each for each in block.operations if each.name == name)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_megatron_has_the_flops_of_the_closed_form_and_the_published_mfu(step: str) -> None:
    hidden, heads, layers, batch, gpus, seconds, mfu = STEPS[step]
    sequence, vocabulary = 2048, 51200
    total = int(gpt(layers, hidden, heads).flops(Share(sequence=sequence, microbatch=batch, flash=False)).total)
    more = 1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    assert total == pytest.approx(72 * batch * sequence * layers * hidden**2 * more, rel=1e-12)
    assert round(100 * total / (seconds * gpus * 312e12), 1) == mfu


def test_full_recomputation_of_the_layers_makes_it_96() -> None:
    """Narayanan et al. 2021: the forward of the layers once more, but not that of the head."""
    hidden, layers, sequence, vocabulary = 6144, 48, 2048, 51200
    model, share = gpt(layers, hidden, 64), Share(sequence=2048, flash=False)
    layer = model.kinds[1][0]
    total = model.flops(share).total + layers * layer.rerun_flops(share, "full")
    more = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert int(total) == pytest.approx(96 * sequence * layers * hidden**2 * more, rel=1e-12)


def test_selective_recomputation_makes_the_scores_again() -> None:
    layer, share = gpt(1, 6144, 64).kinds[1][0], Share(sequence=2048, flash=False)
    assert layer.rerun_flops(share, "selective") == 4 * 2048**2 * 6144
    assert layer.rerun_flops(share, "none") == 0
    assert layer.rerun_flops(share, ["mlp"]) == 16 * 2048 * 6144**2


@pytest.mark.parametrize(("sequence", "microbatch", "hidden", "heads"), [(1024, 6, 2304, 24), (4096, 1, 4096, 32)])
def test_the_three_passes_of_a_layer_are_those_of_zero_bubble(
    sequence: int, microbatch: int, hidden: int, heads: int
) -> None:
    """Qi et al. 2023, table 1."""
    layer = gpt(1, hidden, heads).kinds[1][0]
    passes = layer.flops(Share(sequence=sequence, microbatch=microbatch, flash=False))
    unit = sequence * microbatch * hidden
    assert passes.forward == unit * (24 * hidden + 4 * sequence)
    assert passes.input == unit * (24 * hidden + 8 * sequence)
    assert passes.weight == unit * 24 * hidden
    assert passes.backward == 2 * passes.forward


@pytest.mark.parametrize(
    ("name", "six", "full", "causal"),
    [
        ("llama3-8b", 4.503e10, 1.2885e10, 6.44e9),
        ("llama3-70b", 4.1702e11, 6.44e10, 3.22e10),
        ("llama3.1-405b", 2.4225e12, 2.03e11, 1.01e11),
    ],
)
def test_a_token_costs_six_flops_a_parameter_and_attention(name: str, six: float, full: float, causal: float) -> None:
    """6 (N - Vh) without attention; attention whole or, as flash attention does it forward, half."""
    model, sequence = get_model(name), 8192
    scores = Share(sequence=sequence, flash=False)
    layer = model.kinds[1][0]
    attention = next(each for each in layer.operations if isinstance(each, Attention))
    num_layers = model.num_layers
    products = model.flops(scores).total - num_layers * flops(attention, scores).total
    assert products / sequence == 6 * (model.num_parameters - model.blocks[0].num_parameters - norms(model))
    assert products / sequence == pytest.approx(six, rel=2e-4)
    assert num_layers * flops(attention, scores).total / sequence == pytest.approx(full, rel=5e-3)
    half = num_layers * 3 * flops(attention, Share(sequence=sequence)).forward / sequence
    assert half == pytest.approx(causal, rel=5e-3)


def norms(model: Model) -> int:
    return sum(parameter.count for _, _, parameter in model.parameters() if parameter.role == "norm")


def test_gpt3_has_174_6_billion_parameters_by_the_closed_form() -> None:
    layers, hidden, sequence, vocabulary = 96, 12288, 2048, 51200
    # 12Lh^2 (1 + 13/(12h) + (V+s)/(12Lh)), multiplied out.
    closed = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden
    model = gpt(layers, hidden, 96)
    assert round(closed / 1e9, 2) == 174.62
    assert model.num_parameters == closed + 2 * hidden  # The closed form leaves out the last norm.


def test_flash_attention_makes_the_scores_once_more_in_the_backward() -> None:
    attention = operation(gpt(1, 1024, 16), "layer", "attention")
    passes = flops(attention, Share(sequence=512))
    assert passes.forward == 512 * 513 * 16 * 128
    assert passes.input * 2 == passes.forward * 5
    assert passes.weight == 0


@pytest.mark.parametrize("sequence", [1, 7, 64, 100])
def test_pairs_are_those_that_a_query_may_see(sequence: int) -> None:
    def visible(window: int | None = None, chunk: int | None = None) -> int:
        seen = 0
        for query in range(sequence):
            first = 0 if window is None else max(0, query - window + 1)
            first = first if chunk is None else query // chunk * chunk
            seen += query - first + 1
        return seen

    share = Share(sequence=sequence)
    causal = Attention(name="attention", heads=1, kv_heads=1, qk_dim=1, v_dim=1)
    windowed = replace(causal, window=16)
    assert num_pairs(causal, share) == 2 * visible()
    assert num_pairs(windowed, share) == 2 * visible(window=16)
    assert num_pairs(replace(causal, chunk=16), share) == 2 * visible(chunk=16)
    assert num_pairs(replace(causal, causal=False), share) == 2 * sequence**2
    assert num_pairs(windowed, Share(sequence=sequence, flash=False)) == 2 * sequence**2


def test_context_parallelism_divides_rows_and_pairs() -> None:
    layer = get_model("llama3.1-8b").kinds[1][0]
    one, four = layer.flops(Share(sequence=8192)), layer.flops(Share(sequence=8192, cp=4))
    assert one.total == 4 * four.total


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_tensor_parallelism_divides_every_product_of_a_layer(tp: int) -> None:
    layer = get_model("llama3.1-70b").kinds[1][0]
    assert layer.flops(Share(sequence=4096)).total == tp * layer.flops(Share(sequence=4096, tp=tp)).total


def test_shapes_of_products_on_one_rank() -> None:
    model, share = get_model("llama3.1-70b"), Share(sequence=4096, microbatch=2, tp=8)
    shapes = {each.name: gemm(each, share) for each in model.kinds[1][0].operations if isinstance(each, Matmul)}
    assert shapes == {
        "qkv": (8192, 8192, (64 + 8 + 8) * 128 // 8, 1),
        "out": (8192, 8192 // 8, 8192, 1),
        "up": (8192, 8192, 2 * 28672 // 8, 1),
        "down": (8192, 28672 // 8, 8192, 1),
    }


def test_rows_of_experts_are_spread_evenly_and_cut_as_little_as_the_experts() -> None:
    model = get_model("deepseek-v3")
    up = operation(model, "moe", "expert_up")
    router = operation(model, "moe", "router")
    assert isinstance(up, Matmul)
    assert isinstance(router, Matmul)
    assert gemm(up, Share(sequence=4096, ep=8)) == (4096 * 8 // 32, 7168, 4096, 32)
    cut = Share(sequence=4096, tp=2, sequence_parallel=True, ep=64)
    assert gemm(up, cut) == (4096 * 8 // 2 // 4, 7168, 4096, 4)
    assert gemm(router, cut).m == 2048
    assert gemm(up, Share(sequence=4096, tp=2, expert_tp=2, ep=32)) == (4096 * 8 // 8, 7168, 2048, 8)


def test_experts_cost_what_a_token_meets() -> None:
    """Megatron: 4Th * f_e * topk, times one and a half with a gate."""
    sizes = Sizes(layers=1, hidden=2048, heads=16, vocabulary=1000, experts=Experts(count=64, top_k=6, width=1408))
    model = describe("llama", sizes)
    share = Share(sequence=1024)
    experts = sum(flops(operation(model, "moe", name), share).forward for name in ("expert_up", "expert_down"))
    assert experts == 4 * 1024 * 2048 * 1408 * 6 * 3 // 2


def test_frozen_weights_have_no_gradient_and_first_layers_pass_none_on() -> None:
    patches = operation(get_model("vit-base-16"), "embedding", "patches")
    passes = flops(patches, Share())
    assert passes.forward == passes.weight == 2 * 196 * 768 * 3 * 256
    assert passes.input == 0


def test_a_resnet_50_multiplies_four_billion_pairs_for_an_image() -> None:
    """He et al. 2015, table 1, say 3.8e9 of them with the stride in the first filter; in the second it is 4.1e9."""
    assert get_model("resnet-50").flops(Share()).forward == 2 * 4_089_184_256


@pytest.mark.parametrize("name", {values["model_type"]: name for name, values in CATALOGUE.items()}.values())
def test_arrays_give_what_numbers_give_one_by_one(name: str) -> None:
    model = get_model(name)
    tp, microbatch, ep = np.array([1, 2, 4, 8]), np.array([1, 2, 1, 3]), np.array([1, 2, 4, 1])
    cut = np.array([False, True, True, False])
    many = Share(sequence=256, microbatch=microbatch, tp=tp, sequence_parallel=cut, ep=ep)
    for block, _ in model.kinds:
        together = (
            block.flops(many).total,
            block.traffic(many).moved.total,
            block.saved_bytes(many),
            block.num_parameters_on(many),
        )
        for index in range(4):
            one = Share(
                sequence=256,
                microbatch=int(microbatch[index]),
                tp=int(tp[index]),
                sequence_parallel=bool(cut[index]),
                ep=int(ep[index]),
            )
            alone = (
                block.flops(one).total,
                block.traffic(one).moved.total,
                block.saved_bytes(one),
                block.num_parameters_on(one),
            )
            assert alone == tuple(np.broadcast_to(each, 4)[index] for each in together)
