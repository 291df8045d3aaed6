"""Models and habits of all kinds, unmodified: layer by layer, in microbatches, and with a part on the host."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.placing import Placed
from tests.stages.families import make_batch, make_family, recompute
from tests.stages.small import small_matrices


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def by_layers(module: nn.Module) -> Placed:
    return sw.place(module, ["cpu:0", "cpu:1"])


def in_microbatches(module: nn.Module) -> Placed:
    return sw.place(module, ["cpu:0", "cpu:1"], microbatches=2)


def streamed(module: nn.Module) -> Placed:
    needed = sum(each.numel() * each.element_size() for each in module.parameters()) * (4 if module.training else 1)
    placed = sw.place(module, ["cpu:0", "cpu"], budget={"cpu:0": int(0.9 * needed)}, host="stream")
    assert any(place.name == "cpu" for place in placed.where.values())
    return placed


WAYS = [by_layers, in_microbatches, streamed]
Way = Callable[[nn.Module], Placed]


def assert_same_gradients(plain: nn.Module, placed: nn.Module) -> None:
    for (name, one), (other_name, other) in zip(plain.named_parameters(), placed.named_parameters(), strict=True):
        assert name == other_name
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bert", "vit", "mixtral", "t5"])
def test_families_of_hugging_face_with_their_masks(name: str, way: Way) -> None:
    module: Any = make_family(name)
    plain = copy.deepcopy(module)
    placed = way(module)
    batch = make_batch(name, num_sequences=4)
    if name in ("mixtral", "t5"):
        batch["use_cache"] = False  # type: ignore[assignment]
    for net in (plain, placed):
        net(**batch).logits.square().mean().backward()
    assert_same_gradients(plain, placed)


@pytest.mark.parametrize("way", WAYS)
def test_an_encoder_of_sound_and_a_decoder_of_words(way: Way) -> None:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 97, "num_mel_bins": 8}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**layers, **sizes, **words, max_source_positions=20, max_target_positions=20, dropout=0.0)
    module: Any = hf.WhisperForConditionalGeneration(config).train()
    plain = copy.deepcopy(module)
    placed = way(module)
    sound, tokens = torch.randn(4, 8, 40), torch.randint(3, 97, (4, 6))
    for net in (plain, placed):
        net(input_features=sound, decoder_input_ids=tokens, use_cache=False).logits.square().mean().backward()
        net.eval()
    assert_same_gradients(plain, placed)
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(placed.generate(sound, **settings), plain.generate(sound, **settings))


@pytest.mark.parametrize("way", WAYS)
def test_beams_and_samples_are_the_same_with_the_same_seed(way: Way) -> None:
    module: Any = make_family("llama").eval()
    plain = copy.deepcopy(module)
    placed = way(module)
    batch = make_batch("llama", num_sequences=2)
    for settings in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}):
        written = []
        for net in (plain, placed):
            torch.manual_seed(5)
            written.append(net.generate(**batch, max_new_tokens=4, pad_token_id=0, **settings))
        assert torch.equal(*written)


@pytest.mark.parametrize("way", WAYS)
def test_scaled_losses_autocast_groups_and_rates(way: Way) -> None:
    module: Any = make_family("gpt2")
    plain = copy.deepcopy(module)
    placed = way(module)
    batch = {**make_batch("gpt2", num_sequences=4), "use_cache": False}
    for net in (plain, placed):
        scaler = GradScaler("cpu", init_scale=64.0)
        matrices, others = ([each for each in net.parameters() if (each.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}]
        optimizer = AdamW(groups, lr=1e-3)
        rates = CosineAnnealingLR(optimizer, 4)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(**batch).logits.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            rates.step()
            with torch.no_grad():
                net.eval()(**batch)
            net.train()
    for one, other in zip(plain.parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=1e-2 if way is in_microbatches else 0.0)


@dataclass
class Answer:
    """What a module of somebody's own returns."""

    hidden: Tensor
    penalty: Tensor
    kind: str = "answer"


class Odd(nn.Module):
    """A list of inputs, a layer that is used twice, buffers that change in the forward, and a dataclass to return."""

    mean: Tensor
    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.again = self.layers[1]
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.long))

    def forward(self, parts: list[Tensor], scale: float = 1.0) -> Answer:
        x = parts[0] + parts[1]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.again(x) * scale
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.num_seen += len(x)
        return Answer(hidden=x, penalty=x.square().mean())


@pytest.mark.parametrize("way", WAYS)
def test_lists_dataclasses_shared_layers_and_buffers_that_change(way: Way) -> None:
    module = Odd()
    plain = copy.deepcopy(module)
    placed = way(module)
    parts = [torch.randn(4, 16) for _ in range(2)]
    cut = [[each[:2] for each in parts], [each[2:] for each in parts]] if way is in_microbatches else [parts]
    expected = [plain(each, scale=2.0) for each in cut]
    answer = placed(parts, scale=2.0)
    assert (type(answer), answer.kind) == (Answer, "answer")
    hidden = torch.cat([each.hidden for each in expected])
    torch.testing.assert_close(answer.hidden, hidden)
    (hidden.square().mean() + sum(each.penalty for each in expected) / len(expected)).backward()
    (answer.hidden.square().mean() + answer.penalty).backward()
    assert_same_gradients(plain, placed)
    for (name, one), (_, other) in zip(plain.named_buffers(), placed.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_the_user_are_called(way: Way) -> None:
    module: Any = make_family("gpt2")
    plain = copy.deepcopy(module)
    placed = way(module)
    batch = {**make_batch("gpt2", num_sequences=4), "use_cache": False}
    placed(**batch)  # Lays out the stages, if there are any.
    seen: list[nn.Module] = []
    for net in (plain, placed):
        for block in net.transformer.h:
            block.register_forward_hook(lambda each, _, __: seen.append(each))
        for each in net.parameters():
            each.register_hook(lambda gradient: 2 * gradient)
        net(**batch).logits.square().mean().backward()
    assert {*plain.transformer.h, *module.transformer.h} == set(seen)
    assert_same_gradients(plain, placed)


def test_in_microbatches_parts_may_be_recomputed_in_the_older_way() -> None:
    module: Any = make_family("llama")
    recompute(module, use_reentrant=True)
    plain = copy.deepcopy(module)
    batch = {**make_batch("llama", num_sequences=4), "use_cache": False}
    placed = in_microbatches(module)
    for net in (plain, placed):
        net(**batch).logits.square().mean().backward()
    assert_same_gradients(plain, placed)


def test_a_gradient_of_something_inside_of_a_list_is_refused_in_microbatches() -> None:
    with pytest.raises(ShardwiseError, match="a tensor inside of parts wants a gradient"):
        in_microbatches(Odd())([torch.randn(4, 16, requires_grad=True) for _ in range(2)])
