"""The model as a value: blocks and kinds, names, ties, the table, plain data, and models from sizes."""

import json
import subprocess
import sys

import pytest

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import get_model
from shardwise.model.describe import Experts, Sizes, describe
from shardwise.model.prediction import with_prediction
from shardwise.model.share import Share


def test_equal_layers_are_one_object_and_kinds_count_them() -> None:
    model = get_model("llama3.1-405b")
    assert len(model.blocks) == 128
    assert len(set(map(id, model.blocks))) == 3
    assert [(block.kind, count) for block, count in model.kinds] == [("embedding", 1), ("layer", 126), ("head", 1)]
    assert sum(block.num_parameters for block in model.blocks) == model.num_parameters


def test_parameters_have_the_names_of_the_module() -> None:
    model = get_model("deepseek-v3")
    names = [name for _, name, _ in model.parameters()]
    assert len(names) == len(set(names))
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.60.mlp.experts.down_proj" in names
    assert model.block_names[4] == "model.layers.3"
    found = {index for index, name, _ in model.parameters() if name.startswith("model.layers.3.")}
    assert found == {4}


def test_tied_parameters_count_once_and_are_held_at_both_ends() -> None:
    model = get_model("gpt2")
    assert model.ties == (("transformer.wte.weight", "lm_head.weight"),)
    table = 50257 * 768
    assert sum(block.num_parameters for block in model.blocks) == model.num_parameters + table
    assert get_model("t5-small").ties == (("shared.weight", "decoder.embed_tokens.weight", "lm_head.weight"),)


def test_an_encoder_and_a_decoder_count_their_layers_apart() -> None:
    names = get_model("t5-small").block_names
    assert names[1] == "encoder.block.0"
    assert names[6] == "encoder.block.5"
    assert names[9:15] == tuple(f"decoder.block.{index}" for index in range(6))


def test_a_decoder_that_reads_an_encoder_sends_both_on() -> None:
    blocks = {block.kind: block for block, _ in get_model("t5-small").kinds}
    assert blocks["encoder"].output_elements == 512
    assert blocks["decoder"].output_elements == blocks["decoder embedding"].output_elements == 1024


@pytest.mark.parametrize(
    ("name", "reductions"), [("llama3.1-8b", 2), ("gpt-neox-20b", 1), ("falcon-7b", 1), ("mixtral-8x7b", 2)]
)
def test_sublayers_side_by_side_are_summed_over_ranks_once(name: str, reductions: int) -> None:
    assert get_model(name).kinds[1][0].num_reductions == reductions


def test_the_table_of_a_model() -> None:
    assert str(get_model("mixtral-8x7b")).splitlines() == [
        "mixtral-8x7b: 46,702,792,704 parameters, 12.880 B active; at sequence 2048, one sequence:",
        "block                    count       parameters      forward     backward      saved",
        "embedding                    1      131,072,000       0 FLOP       0 FLOP   16.0 KiB",
        "moe                         32    1,451,270,144   1.65 TFLOP   3.32 TFLOP  504.4 MiB",
        "head                         1      131,076,096    537 GFLOP   1.07 TFLOP  157.0 MiB",
    ]


def test_a_model_is_plain_data() -> None:
    data = get_model("mixtral-8x7b").to_dict()
    assert json.loads(json.dumps(data))["num_parameters"] == 46_702_792_704
    layer = data["blocks"][1]
    assert (layer["kind"], layer["count"], layer["stack"]) == ("moe", 32, "model.layers")
    assert [each["type"] for each in layer["operations"]][:5] == [
        "norm",
        "matmul",
        "elementwise",
        "attention",
        "matmul",
    ]


def test_a_pipeline_sends_a_layers_output_and_full_recomputation_keeps_its_input() -> None:
    layer = get_model("llama3.1-8b").kinds[1][0]
    share = Share(sequence=8192, microbatch=2, tp=8, cp=2)
    assert layer.output_bytes(share) == layer.input_bytes(share) == 2 * 4096 * 4096 * 2
    cut = Share(sequence=8192, microbatch=2, tp=8, cp=2, sequence_parallel=True)
    assert layer.output_bytes(cut) == 2 * 4096 * 4096 * 2 // 8


def test_sizes_alone_describe_the_published_models() -> None:
    llama = Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    assert describe("llama", llama).num_parameters == get_model("llama3-8b").num_parameters
    first = Sizes(layers=32, hidden=4096, heads=32, vocabulary=32000)
    assert describe("llama", first).num_parameters == get_model("llama-7b").num_parameters
    gpt = Sizes(layers=96, hidden=12288, heads=96, vocabulary=50257)
    assert describe("gpt", gpt).num_parameters == get_model("gpt3-175b").num_parameters
    bloom = Sizes(layers=70, hidden=14336, heads=112, vocabulary=250880)
    assert describe("bloom", bloom).num_parameters == get_model("bloom-176b").num_parameters
    untied = describe("gpt", Sizes(layers=2, hidden=64, heads=4, vocabulary=100, tied=False))
    tied = describe("gpt", Sizes(layers=2, hidden=64, heads=4, vocabulary=100), name="mine")
    assert untied.num_parameters == tied.num_parameters + 6400
    assert tied.name == "mine"


def test_sizes_with_experts_describe_a_mixture() -> None:
    experts = Experts(count=8, top_k=2, width=14336)
    sizes = Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=32000, experts=experts)
    assert describe("llama", sizes).num_parameters == get_model("mixtral-8x7b").num_parameters
    assert describe("llama", sizes).num_active_parameters == get_model("mixtral-8x7b").num_active_parameters


def test_sizes_that_a_style_does_not_have_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="style gpt has no experts, and as many keys as its 32 heads"):
        describe("gpt", Sizes(layers=1, hidden=64, heads=32, kv_heads=8, vocabulary=100))
    with pytest.raises(ShardwiseError, match="style bloom has an MLP of 4 x 64, not of 100"):
        describe("bloom", Sizes(layers=1, hidden=64, heads=4, ffn=100, vocabulary=100))
    with pytest.raises(ShardwiseError, match="unknown style 'lama'"):
        describe("lama", Sizes(layers=1, hidden=64, heads=4, vocabulary=100))  # type: ignore[arg-type]


def test_prediction_layers_add_a_layer_a_projection_and_another_head() -> None:
    """DeepSeek V3, section 2.2: a layer, a projection and three norms of its own; table and head are shared."""
    plain = get_model("deepseek-v3")
    model = with_prediction(plain)
    kinds = {block.kind: block for block, _ in model.kinds}
    own = kinds["moe"].num_parameters + 2 * 7168**2 + 3 * 7168
    assert model.num_parameters == plain.num_parameters + own
    share = Share(sequence=4096)
    more = model.flops(share).forward - plain.flops(share).forward
    head = 2 * 4096 * 7168 * 129280
    assert more == kinds["moe"].flops(share).forward + head + 2 * 4096 * 2 * 7168**2


def test_prediction_layers_are_of_a_kind_that_the_model_has() -> None:
    nemotron = get_model("nemotron-3-super")
    twice = with_prediction(nemotron, count=2, layers=("attention", "moe"))
    assert [block.kind for block in twice.blocks[-2:]] == ["prediction", "prediction"]
    assert twice.name == "nemotron-3-super-120b-a12b+mtp2"
    with pytest.raises(ShardwiseError, match="unknown kind of layer of nemotron-3-super-120b-a12b 'dense'"):
        with_prediction(nemotron, layers=("dense",))


def test_describing_a_model_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from shardwise.model.catalogue import get_model; print(get_model('llama3.1-405b'));"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
