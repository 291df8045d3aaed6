"""Unmodified models with kernels: what is recognised, what is left, and that they train as before."""

import copy
import pickle
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import shardwise as sw
from shardwise.fusion.fuse import fuse
from shardwise.kernels.lazy_logits import LazyLogits
from tests.fusion.models import CONFIGS, WORDS, make, make_batch, model_loss, own_loss

ATTENTION = "rotary positions and torch's fastest attention"
SILU, TANH = "MLP with a silu gate", "MLP with a gelu_tanh gate"
EXPERTS = "experts with a silu gate"
HEAD = {"head, its logits never whole in a cross entropy": 1}
#: What two layers of each family have.
FOUND: dict[str, dict[str, int]] = {
    "llama": {ATTENTION: 2, SILU: 2, "RMS norm": 5},
    "qwen2": {ATTENTION: 2, SILU: 2, "RMS norm": 5},
    "qwen3": {ATTENTION: 2, SILU: 2, "RMS norm": 9},
    "mistral": {ATTENTION: 2, SILU: 2, "RMS norm": 5},
    "gemma": {ATTENTION: 2, TANH: 2, "RMS norm of 1 + w": 5},
    "gemma2": {ATTENTION: 2, TANH: 2, "RMS norm of 1 + w": 9},
    "gemma3": {ATTENTION: 2, TANH: 2, "RMS norm of 1 + w": 13},
    "phi3": {ATTENTION: 2, SILU: 2, "RMS norm": 5},
    "olmo2": {ATTENTION: 2, SILU: 2, "RMS norm": 9},
    "granite": {ATTENTION: 2, SILU: 2, "RMS norm": 5},
    "stablelm": {ATTENTION: 2, SILU: 2, "layer norm": 5},
    "gpt_neox": {ATTENTION: 2, "layer norm": 5},
    "gpt2": {"torch's fastest attention": 2, "layer norm": 5},
    "mixtral": {ATTENTION: 2, EXPERTS: 2, "RMS norm": 5},
    "qwen3_moe": {ATTENTION: 2, EXPERTS: 2, "RMS norm": 9},
}


def test_every_family_is_recognised_by_what_it_computes_and_is_itself_again_afterwards() -> None:
    assert FOUND.keys() == CONFIGS.keys()
    for name, wanted in FOUND.items():
        module = make(name)
        kinds, keys = [type(each) for each in module.modules()], list(module.state_dict())
        fused = fuse(module)
        assert Counter(fused.replaced.values()) == wanted | HEAD, name
        assert not fused.left, name
        assert list(module.state_dict()) == keys
        assert all(isinstance(each, kind) for each, kind in zip(module.modules(), kinds, strict=True))
        twin, loaded = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        assert [type(each) for each in twin.modules()] == [type(each) for each in module.modules()]
        assert [type(each) for each in loaded.modules()] == kinds, "what is pickled knows no kernels"
        fused.undo()
        assert [type(each) for each in module.modules()] == kinds


def outcome(module: nn.Module) -> tuple[float, dict[str, Tensor], Any]:
    module.zero_grad()
    made = module(**make_batch(), use_cache=False)
    made.loss.backward()
    gradients = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    return made.loss.item(), gradients, made.logits


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", *(pytest.param(each, marks=pytest.mark.whole) for each in ("gemma2", "phi3"))]
)
def test_losses_and_gradients_are_those_without_kernels_and_logits_are_never_whole(name: str) -> None:
    module = make(name).train()
    loss, gradients, _ = outcome(module)
    fuse(module)
    with_kernels, found, logits = outcome(module)
    assert isinstance(logits, LazyLogits)
    assert not logits.is_read, "somebody has looked at the logits"
    assert logits.shape == (2, 6, WORDS)
    assert with_kernels == pytest.approx(loss, rel=1e-5)
    for key, wanted in gradients.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-4, atol=1e-5)


def losses(module: nn.Module, plan: str, loss: Any = own_loss, **options: Any) -> list[float]:
    batch = make_batch()
    engine = sw.parallelize(module, plan, loss=loss, optimizer=partial(SGD, lr=0.1), example=batch, **options)
    assert ("kernels in place of" in engine.explain()) == options.get("kernels", True)
    made = [engine.train_step(batch), engine.train_step(batch)]
    engine.close()
    return made


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("pp=2,schedule=zb-h1,microbatches=2", own_loss),
        pytest.param("dp=1,recompute=full", model_loss, marks=pytest.mark.whole),
    ],
)
def test_an_engine_uses_them_lists_them_and_leaves_the_module_as_it_was(plan: str, loss: Any) -> None:
    module = make("llama")
    kinds = [type(each) for each in module.modules()]
    wanted = losses(copy.deepcopy(module), "dp=1", kernels=False)
    assert losses(module, plan, loss) == pytest.approx(wanted, rel=1e-5)
    assert [type(each) for each in module.modules()] == kinds


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """The halves of one product, the gate last; its class says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 12), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.w1(x).chunk(2, -1)
        return self.w2(nn.functional.gelu(gate) * up)  # type: ignore[no-any-return]


def test_names_alone_recognise_nothing_and_strange_names_hide_nothing() -> None:
    norm, hooked, patched = nn.RMSNorm(4), nn.RMSNorm(4), nn.RMSNorm(4)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    heads = [nn.Linear(4, 9, bias=False), nn.Linear(4, 9), nn.Linear(4, 8, bias=False)]
    module = nn.ModuleList([Doubled(4), Relu(), Turned(), norm, hooked, patched, *heads, nn.Embedding(9, 4)])
    fused = fuse(module)
    head = next(iter(HEAD))
    assert fused.replaced == {"2": "MLP with a gelu gate", "3": "RMS norm", "6": head}
    assert fused.left["7"] == "it has a bias"
    assert "8" not in fused.left, "it scores as many words as no embedding has"
    assert "another function" in fused.left["0"]
    assert "another function" in fused.left["1"]
    assert "hooks" in fused.left["4"]
    assert "replaced by somebody else" in fused.left["5"]
    given = torch.randn(2, 3, 4)
    mine = module[2](given)
    fused.undo()
    torch.testing.assert_close(mine, module[2](given))


def test_positions_whose_halves_differ_are_left() -> None:
    module = make("llama")
    rotary: Any = module.model.rotary_emb  # type: ignore[union-attr]

    class Odd(type(rotary)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cosine, sine = super().forward(x, position_ids)
            return cosine.flip(-1) * torch.arange(cosine.shape[-1], device=x.device), sine

    rotary.__class__ = Odd
    found = set(fuse(module).replaced.values())
    assert ATTENTION not in found
    assert found >= {"torch's fastest attention", SILU}


def test_logits_that_wait_are_what_they_would_be_for_whoever_looks() -> None:
    module = make("granite").train()
    batch = make_batch()
    plain = module(**batch, use_cache=False).logits
    fuse(module)
    logits = module(**batch, use_cache=False).logits
    wide, rows = logits.float(), logits[:, :-1].reshape(-1, WORDS)
    assert isinstance(wide, LazyLogits)
    assert isinstance(rows, LazyLogits)
    assert (rows.shape, rows.dtype, logits.numel()) == ((10, WORDS), torch.float32, 12 * WORDS)
    torch.testing.assert_close(logits.argmax(-1), plain.argmax(-1))
    torch.testing.assert_close(rows + 0, plain[:, :-1].reshape(-1, WORDS))
    wide.mul_(0.0)
    assert not (logits + 0).any(), "float() of float32 is the same tensor, and so is what was written into it"
    again = module(**batch, use_cache=False).logits
    kept = again.contiguous()[:, :-1]
    again.zero_()
    assert not (kept + 0).any(), "a view shows what was written"
    doubled = module(**batch, use_cache=False).logits * 2
    torch.testing.assert_close(doubled + 0, plain * 2)
