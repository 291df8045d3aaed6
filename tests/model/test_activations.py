"""Bytes kept for the backward, against the published closed forms."""

import pytest

from shardwise.model.catalogue import get_model
from shardwise.model.describe import Experts, Sizes, describe
from shardwise.model.model import Block
from shardwise.model.share import Share

GIB = 2**30

# Korthikanti et al. 2022, table 3 and figures 1 and 7: hidden, heads, layers, microbatch, stages, chunks; activations
# in GiB with tensor parallelism alone, and with sequence parallelism and selective recomputation.
KORTHIKANTI = {
    "22B": (6144, 64, 48, 4, 1, 1, 59.25, 9.5625),
    "175B": (12288, 96, 96, 1, 8, 3, 66.84375, 12.3515625),
    "530B": (20480, 128, 105, 1, 35, 3, 114.0234375, 23.076171875),
    "1T": (25600, 160, 128, 1, 64, 1, 131.25, 26.5625),
}
# Percent of tensor parallelism alone: sequence parallel, selective, both, full recomputation.
PERCENT = {
    "22B": (66.8, 49.4, 16.1, 7.6),
    "175B": (62.0, 56.5, 18.5, 8.7),
    "530B": (58.3, 61.9, 20.2, 9.5),
    "1T": (58.3, 61.9, 20.2, 9.5),
}


def gpt_layer(hidden: int, heads: int) -> Block:
    sizes = Sizes(layers=1, hidden=hidden, heads=heads, vocabulary=51200, dropout=True)
    return describe("gpt", sizes).kinds[1][0]


def megatron(sequence: int, microbatch: int, *, tp: int, sequence_parallel: bool = False) -> Share:
    return Share(sequence=sequence, microbatch=microbatch, tp=tp, sequence_parallel=sequence_parallel, flash=False)


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_the_first_stage_keeps_what_korthikanti_says_to_every_digit(model: str) -> None:
    hidden, heads, num_layers, microbatch, stages, chunks, plain, best = KORTHIKANTI[model]
    layer = gpt_layer(hidden, heads)
    in_flight = num_layers * (1 if chunks == 1 else 1 + (stages - 1) / (stages * chunks))
    none = layer.saved_bytes(megatron(2048, microbatch, tp=8))
    both = layer.saved_bytes(megatron(2048, microbatch, tp=8, sequence_parallel=True), "selective")
    assert none * in_flight / GIB == pytest.approx(plain, rel=1e-12)
    assert both * in_flight / GIB == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("model", PERCENT)
def test_each_technique_saves_the_published_share(model: str) -> None:
    hidden, heads, _, microbatch, *_ = KORTHIKANTI[model]
    layer = gpt_layer(hidden, heads)
    plain, cut = (megatron(2048, microbatch, tp=8, sequence_parallel=sp) for sp in (False, True))
    kept = [
        layer.saved_bytes(cut),
        layer.saved_bytes(plain, "selective"),
        layer.saved_bytes(cut, "selective"),
        layer.saved_bytes(plain, "full"),
    ]
    none = layer.saved_bytes(plain)
    assert [round(100 * int(each) / int(none), 1) for each in kept] == list(PERCENT[model])


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(("sequence", "microbatch", "hidden", "heads"), [(2048, 4, 6144, 64), (1024, 1, 1024, 16)])
def test_a_gpt_layer_follows_the_closed_forms(tp: int, sequence: int, microbatch: int, hidden: int, heads: int) -> None:
    layer = gpt_layer(hidden, heads)
    unit = sequence * microbatch * hidden
    scores = 5 * heads * sequence**2 * microbatch
    plain = megatron(sequence, microbatch, tp=tp)
    cut = megatron(sequence, microbatch, tp=tp, sequence_parallel=True)
    assert layer.saved_bytes(plain) == unit * 10 + (unit * 24 + scores) // tp
    assert layer.saved_bytes(plain, "selective") == unit * 10 + unit * 24 // tp
    assert layer.saved_bytes(cut) == (34 * unit + scores) // tp
    assert layer.saved_bytes(cut, "selective") == 34 * unit // tp
    assert layer.saved_bytes(plain, "full") == 2 * unit
    assert layer.saved_bytes(cut, "full") == 2 * unit // tp
    # Flash attention keeps no scores, only a sum in float32 for each head and row.
    flash = Share(sequence=sequence, microbatch=microbatch, tp=tp, sequence_parallel=True)
    assert layer.saved_bytes(flash) == (34 * unit + 4 * heads * sequence * microbatch) // tp


@pytest.mark.parametrize(
    ("name", "per_hidden"), [("llama3.1-8b", 34.0), ("llama3.1-70b", 33.5), ("llama3.1-405b", 31.75)]
)
def test_a_llama_layer_follows_its_closed_form(name: str, per_hidden: float) -> None:
    """12h + 4kd + 6f + 4a bytes a token, all fused; 2f more where silu and the product are two kernels."""
    model = get_model(name)
    layer = model.kinds[1][0]
    heads, kv_width, ffn = {
        "llama3.1-8b": (32, 1024, 14336),
        "llama3.1-70b": (64, 1024, 28672),
        "llama3.1-405b": (128, 1024, 53248),
    }[name]
    one = layer.saved_bytes(Share())
    assert one == 12 * model.hidden + 4 * kv_width + 6 * ffn + 4 * heads
    assert (one - 4 * heads) / model.hidden == pytest.approx(per_hidden, abs=1e-9)
    # Hugging Face's norm: a float32 copy and a normalised one in place of the input, twice.
    assert layer.saved_bytes(Share(fused=False)) == one + 2 * ffn + 2 * 4 * model.hidden


def test_tensor_parallelism_alone_leaves_the_inputs_of_norms_and_projections_whole() -> None:
    model = get_model("llama3.1-8b")
    layer = model.kinds[1][0]
    whole = 8 * model.hidden
    assert layer.saved_bytes(Share(tp=8)) == whole + (layer.saved_bytes(Share()) - whole) // 8


def test_what_columns_read_is_whole_where_it_is_gathered_once() -> None:
    model = get_model("llama3.1-8b")
    layer = model.kinds[1][0]
    again, once = (Share(tp=8, sequence=8, sequence_parallel=True, gathered_once=kept) for kept in (False, True))
    # The outputs of both norms, of which a rank otherwise has an eighth.
    assert layer.saved_bytes(once) - layer.saved_bytes(again) == 2 * 2 * model.hidden * (8 - 1)


def test_a_mixture_keeps_what_it_sends_computes_and_gets_back() -> None:
    """2kh + 6kf + 2kh, and the router's scores twice in float32."""
    sizes = Sizes(layers=1, hidden=2048, heads=16, vocabulary=1000, ffn=5632)
    dense = describe("llama", sizes).kinds[1][0]
    experts = Experts(count=64, top_k=6, width=1408)
    sparse = describe("llama", Sizes(layers=1, hidden=2048, heads=16, vocabulary=1000, experts=experts)).kinds[1][0]
    without_mlp = dense.saved_bytes(Share()) - 6 * 5632
    assert sparse.saved_bytes(Share()) == without_mlp + 6 * (4 * 2048 + 6 * 1408) + 8 * 64
    assert sparse.saved_bytes(Share(), ["moe"]) == without_mlp + 8 * 64


@pytest.mark.parametrize(
    ("choice", "dropped"),
    [("norm", 2 * 2 * 4096), ("activation", 2 * 14336), ("mlp", 6 * 14336), ("core_attention", 0)],
)
def test_a_part_that_is_made_again_is_not_kept(choice: str, dropped: int) -> None:
    layer = get_model("llama3.1-8b").kinds[1][0]
    assert layer.saved_bytes(Share()) - layer.saved_bytes(Share(), [choice]) == dropped


def test_latent_attention_may_make_its_heads_again() -> None:
    layer = get_model("deepseek-v3").kinds[1][0]
    heads = 128 * (192 + 192 + 128)
    assert layer.saved_bytes(Share()) - layer.saved_bytes(Share(), ["mla_up"]) == 2 * heads
    assert layer.rerun_flops(Share(), ["mla_up"]) == 2 * (1536 * 128 * 192 + 512 * 128 * 256)


def test_the_head_keeps_its_norm_its_input_and_the_logits() -> None:
    """Korthikanti et al. section 4.3: 4sbh + 4sbV, the logits in float32; a fused loss keeps them as they are."""
    head = get_model("gpt3-175b").kinds[-1][0]
    assert head.saved_bytes(Share(fused=False)) == 4 * 12288 + 4 * 50257
    assert head.saved_bytes(Share()) == 4 * 12288 + 2 * 50257


def test_the_embedding_keeps_its_tokens_and_its_mask() -> None:
    embedding = get_model("gpt3-175b").kinds[0][0]
    assert embedding.saved_bytes(Share()) == 8 + 12288


def test_between_the_two_halves_of_a_backward_a_layer_holds_inputs_and_gradients_of_outputs() -> None:
    """Qi et al. 2023, table 1: 32sbh of a GPT layer."""
    layer = gpt_layer(2304, 24)
    share = Share(sequence=1024, microbatch=6)
    assert layer.held_for_weights_bytes(share) == 32 * 1024 * 6 * 2304


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama3-8b", 131_072),
        ("llama3-70b", 327_680),
        ("llama3.1-405b", 516_096),
        ("gpt3-175b", 4_718_592),
        ("deepseek-v3", 70_272),
    ],
)
def test_a_token_takes_this_much_of_the_cache(name: str, num_bytes: int) -> None:
    assert get_model(name).cache_bytes(Share()) == num_bytes


def test_heads_of_keys_are_cut_in_the_cache_and_latents_are_not() -> None:
    assert get_model("llama3-8b").cache_bytes(Share(tp=8)) == 131_072 // 8
    assert get_model("llama3-8b").cache_bytes(Share(tp=16)) == 131_072 // 8
    assert get_model("deepseek-v3").cache_bytes(Share(tp=8)) == 70_272


def test_a_window_bounds_the_cache_and_mamba_keeps_a_state_only() -> None:
    kinds = {block.kind: block for block, _ in get_model("gemma3-27b").kinds}
    assert kinds["sliding"].cache is not None
    assert kinds["sliding"].cache.window == 1024
    mamba = {block.kind: block for block, _ in get_model("nemotron-3-nano").kinds}["mamba"].cache
    assert mamba is not None
    assert (mamba.elements, mamba.state_elements) == (0, 64 * 64 * 128 + (64 * 64 + 2 * 8 * 128) * 3)
