"""Traced modules against torch's own counter, and against what their configurations describe."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import ShardwiseError
from shardwise.model.config import read_config
from shardwise.model.model import Model
from shardwise.model.operations import Attention, Convolution
from shardwise.model.share import Share
from shardwise.model.trace import trace_model
from tests.model.families import CONFIGURATIONS, build
from tests.stages.nets import ResNet50, UNet
from tests.stages.small import small_matrices

SAMPLES, LENGTH = 2, 12
FAMILIES = ["llama", "gpt2", "mixtral", "deepseek v3", "gpt-neox", "t5", "bert", "vit", "resnet basic"]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def example(configuration: Any, length: int = LENGTH) -> dict[str, Tensor]:
    if configuration.model_type in ("vit", "resnet"):
        side = getattr(configuration, "image_size", 32)
        return {"pixel_values": torch.zeros(SAMPLES, 3, side, side)}
    tokens = torch.zeros(SAMPLES, length, dtype=torch.long)
    return (
        {"input_ids": tokens, "decoder_input_ids": tokens}
        if configuration.model_type == "t5"
        else {"input_ids": tokens}
    )


def counted(module: nn.Module, batch: Any) -> tuple[int, int]:
    """FLOPs forward and backward as torch counts them in a real run."""
    with FlopCounterMode(display=False) as counter:
        output = module(**batch) if isinstance(batch, dict) else module(*batch)
        forward = counter.get_total_flops()
        named = output if isinstance(output, (dict, Tensor)) else dict(output)
        value = named if isinstance(named, Tensor) else next(iter(named.values()))
        value.sum().backward()
    return forward, counter.get_total_flops() - forward


def plain(configuration: Any) -> nn.Module:
    """A module with scores, and with experts one after the other, which is what torch's counter sees."""
    torch.manual_seed(0)
    module = build(configuration).train()
    if configuration.model_type != "resnet":
        module.set_attn_implementation("eager")  # type: ignore[operator]
    return module


@cache
def traced_family(family: str) -> Model:
    return trace_model(plain(CONFIGURATIONS[family]), example(CONFIGURATIONS[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_module_has_its_parameters_and_flops_and_so_has_its_configuration(family: str) -> None:
    configuration = CONFIGURATIONS[family]
    module, batch = plain(configuration), example(configuration)
    traced = traced_family(family)
    if family in ("mixtral", "deepseek v3"):
        module.set_experts_implementation("eager")  # type: ignore[operator]
    forward, backward = counted(module, batch)
    described = read_config({**configuration.to_dict(), "image_size": getattr(configuration, "image_size", 32)})
    assert traced.num_parameters == described.num_parameters == sum(each.numel() for each in module.parameters())
    assert traced.num_active_parameters == described.num_active_parameters
    share = Share(microbatch=SAMPLES, sequence=LENGTH, flash=False)
    for model in (traced, described):
        passes = model.flops(share)
        assert (passes.forward, passes.backward) == (forward, backward)
    assert traced.flops(share) == described.flops(share)


def test_blocks_are_the_items_of_the_modules_lists() -> None:
    def outline(model: Model) -> list[tuple[str, int]]:
        return [(block.kind, count) for block, count in model.kinds]

    llama = traced_family("llama")
    assert outline(llama) == [("before", 1), ("LlamaDecoderLayer", 2), ("after", 1)]
    assert llama.block_names == ("before", "model.layers.0", "model.layers.1", "after")
    assert llama.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert (llama.hidden, llama.vocabulary, llama.sequence) == (32, 97, LENGTH)
    t5 = traced_family("t5")
    assert t5.block_names[1:3] == ("encoder.block.0", "encoder.block.1")
    assert t5.block_names[4:6] == ("decoder.block.0", "decoder.block.1")


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: ResNet50(width=8, num_classes=10), (torch.zeros(SAMPLES, 3, 32, 32),)),
        (UNet, (torch.zeros(SAMPLES, 3, 16, 16), torch.zeros(SAMPLES))),
    ],
    ids=["resnet-50", "u-net"],
)
def test_networks_of_filters_are_traced_too(make: Any, batch: Any) -> None:
    module = make().train()
    traced = trace_model(module, batch)
    passes = traced.flops(Share(microbatch=SAMPLES))
    assert (passes.forward, passes.backward) == counted(module, batch)
    assert traced.num_parameters == sum(each.numel() for each in module.parameters())
    assert sum(isinstance(each, Convolution) for block in traced.blocks for each in block.operations) > 10
    names = {name for _, name, _ in traced.parameters()}
    assert names == {name for name, _ in module.named_parameters()}


WIDE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def in_bfloat16(configuration: Any, attention: str, **more: Any) -> Model:
    with torch.device("meta"):
        module = hf.AutoModelForCausalLM.from_config(configuration, attn_implementation=attention)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    return trace_model(module.to(torch.bfloat16).train(), {"input_ids": tokens, **more})


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("mixtral", "sdpa")]
)
def test_autograd_keeps_what_is_described_but_for_the_statistics_of_rows(family: str, attention: str) -> None:
    """The description leaves out a norm's statistics, and of experts the order of the rows: under half a percent."""
    configuration = {
        "llama": hf.LlamaConfig(**WIDE),
        "qwen3": hf.Qwen3Config(**WIDE, head_dim=32),
        "mixtral": hf.MixtralConfig(**WIDE, num_local_experts=8, num_experts_per_tok=2),
    }[family]
    traced = in_bfloat16(configuration, attention).kinds[1][0]
    described = read_config(configuration.to_dict()).kinds[1][0]
    share = Share(sequence=128, flash=attention == "sdpa", fused=False)
    kept, expected = int(traced.saved_bytes(Share())), int(described.saved_bytes(share))
    assert expected < kept < 1.005 * expected


def test_kernels_move_what_is_described() -> None:
    """A tenth of difference is glue: masks, and gradients of inputs that several products read."""
    configuration = hf.LlamaConfig(**WIDE)
    traced = in_bfloat16(configuration, "sdpa").kinds[1][0]
    described = read_config(configuration.to_dict()).kinds[1][0]
    unfused = described.traffic(Share(sequence=128, fused=False)).moved
    assert int(traced.traffic(Share(fused=False)).moved.forward) == pytest.approx(int(unfused.forward), rel=0.1)
    assert int(traced.traffic(Share(fused=False)).moved.backward) == pytest.approx(int(unfused.backward), rel=0.1)
    fused = described.traffic(Share(sequence=128)).moved
    assert int(traced.traffic(Share()).moved.forward) == pytest.approx(int(fused.forward), rel=0.15)
    assert int(traced.traffic(Share()).moved.backward) == pytest.approx(int(fused.backward), rel=0.15)


def test_the_loss_keeps_a_softmax_in_float32() -> None:
    tokens = torch.zeros(1, 128, dtype=torch.long)
    configuration = hf.LlamaConfig(**WIDE)
    traced = in_bfloat16(configuration, "sdpa", labels=tokens).blocks[-1]
    described = read_config(configuration.to_dict()).blocks[-1]
    expected = int(described.saved_bytes(Share(sequence=128, fused=False)))
    assert int(traced.saved_bytes(Share())) == pytest.approx(expected, rel=0.01)


def test_flash_attention_is_one_operation_and_knows_that_it_is_causal() -> None:
    layer = in_bfloat16(hf.LlamaConfig(**WIDE), "sdpa").kinds[1][0]
    attention = next(each for each in layer.operations if isinstance(each, Attention))
    assert (attention.heads, attention.kv_heads, attention.qk_dim) == (8, 4, 32)
    assert (attention.causal, attention.rows) == (True, 128)


def test_samples_scale_and_the_module_is_as_it_was() -> None:
    module = UNet(width=4, num_levels=2).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    few, many = (trace_model(module, (torch.zeros(count, 3, 8, 8), torch.zeros(count))) for count in (2, 6))
    share = Share(microbatch=6)
    assert few.flops(share) == many.flops(share)
    assert [block.saved_bytes(share) for block in few.blocks] == [block.saved_bytes(share) for block in many.blocks]
    after = module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_a_run_in_earnest_sees_the_same() -> None:
    module = UNet(width=4, num_levels=2)
    batch = (torch.zeros(2, 3, 8, 8), torch.zeros(2))
    assert trace_model(module, batch, fake=False).to_dict() == trace_model(module, batch).to_dict()
    assert all(parameter.grad is None for parameter in module.parameters())


class Pair(nn.Module):
    """Two layers of which the first is frozen, and a third that is the second again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = self.second

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(self.first(x))))  # type: ignore[no-any-return]


def test_what_is_frozen_has_no_weight_gradient_and_what_is_used_twice_counts_once() -> None:
    model = trace_model(Pair(), torch.zeros(4, 8))
    passes = model.flops(Share())
    product = 2 * 8 * 8
    # Nothing before the second layer trains, so that its input needs no gradient either.
    assert passes == (3 * product, product, 2 * product)
    assert model.num_parameters == 2 * 64 + 8
    assert len(model.ties) == 1
    frozen = [name for _, name, parameter in model.parameters() if not parameter.trains]
    assert frozen == ["first.weight", "first.bias"]


class Asks(nn.Module):
    """Does something else if its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        repeat = int(x.sum().item())
        return self.layer(x) * repeat  # type: ignore[no-any-return]


def test_a_module_that_asks_for_numbers_is_told_how_else_to_be_traced() -> None:
    with pytest.raises(ShardwiseError) as caught:
        trace_model(Asks(), torch.zeros(2, 4))
    assert caught.value.problem == (
        "Asks reads values while it runs (aten._local_scalar_dense.default), and a trace has none"
    )
    assert (
        caught.value.remedy
        == "trace_model(module, batch, fake=False), which runs it with real tensors on a small batch"
    )
    assert trace_model(Asks(), torch.ones(2, 4), fake=False).num_parameters == 20


def test_a_module_without_anything_to_train_and_a_batch_without_samples_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="no output of the module depends on a parameter that requires a gradient"):
        trace_model(nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4))
    with pytest.raises(ShardwiseError, match="the example batch holds no tensor with a dimension for its samples"):
        trace_model(nn.Linear(4, 4), torch.zeros(()))


def test_labels_of_a_batch_are_no_argument_of_a_forward_that_takes_none() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]

    batch = {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    assert trace_model(Small(), batch).num_parameters == 2 * (8 * 8 + 8)
    with pytest.raises(ShardwiseError, match="takes x, and the example has labels"):
        trace_model(Small(), {"labels": batch["labels"]})
