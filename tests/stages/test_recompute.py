"""Layers that are computed again in backwards: the same bits, nothing but inputs kept, and nothing dear twice."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.engine.engine import Engine
from shardwise.execution.recording import ACTIVATIONS
from shardwise.stages import recompute as recompute_room
from shardwise.stages.recalled import DEAR, recalling
from shardwise.torch_private import TorchDispatchMode
from tests.engine.test_engine import NUM_TOKENS, Dropping, an_engine, token_loss, tokens
from tests.same import gradients_of
from tests.stages.families import make_batch, make_family, recompute
from tests.stages.pieces import Net

KINDS = ("none", "full", "selective")


class Matmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dear."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in DEAR
        return func(*args, **(kwargs or {}))


class Gated(nn.Module):
    """Blocks whose insides are saved behind a matmul."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def count_matmuls(engine: Engine) -> int:
    with Matmuls() as found:
        engine.train_step(tokens())
    return int(found.count)


@pytest.mark.parametrize(
    "plan",
    [
        "microbatches=2,precision=bf16",
        "pp=2,microbatches=4",
        "pp=2,schedule=pipedream-2bw,microbatches=4",
        "pp=2,schedule=zb-v,microbatches=4",
    ],
)
def test_no_bit_changes_with_dropout_and_batch_norm(plan: str) -> None:
    results = []
    for kind in (*KINDS, *([] if "zb" in plan else ["full,recompute_layers=1"])):
        engine = an_engine(f"{plan},recompute={kind}", Dropping())
        torch.manual_seed(7)
        losses = [engine.train_step(tokens(seed=step)) for step in range(2)]
        results.append((losses, engine.state_dict(), torch.get_rng_state()))
    losses, weights, chance = results[0]
    for again, alike, left in results[1:]:
        assert losses == again
        assert all(torch.equal(alike[name], each) for name, each in weights.items())
        assert torch.equal(chance, left)


def test_one_layer_at_a_time_is_there_again() -> None:
    """Of eight layers' insides, how many are alive when one is made in the backward: those of that layer alone."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def watch(_module: nn.Module, _given: Any, made: Tensor) -> None:
        alive.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(made))

    most = {}
    for kind in KINDS:
        net = Net(num_blocks=8)
        for block in net.blocks:
            block.get_submodule("0").register_forward_hook(watch)  # What a LayerNorm makes, a Linear saves.
        engine = an_engine(f"recompute={kind}", net)
        alive.clear()
        seen.clear()
        engine.train_step(tokens())
        most[kind] = max(alive)
    assert most == {"none": 7, "full": 0, "selective": 0}


@pytest.mark.parametrize("plan", ["microbatches=1", "pp=2,microbatches=2", "pp=2,schedule=zb-h1,microbatches=2"])
def test_selective_recomputation_multiplies_nothing_twice(plan: str) -> None:
    none, full, selective = (count_matmuls(an_engine(f"{plan},recompute={kind}", Gated())) for kind in KINDS)
    assert none == selective < full


def test_layers_of_transformers_that_recompute_by_themselves_are_recomputed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        ours.append("layer")
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(recompute_room, "checkpoint", noted)
    batch = make_batch("llama")
    for is_theirs in (False, True):
        module = make_family("llama", num_layers=2)
        if is_theirs:
            recompute(module)
        engine = an_engine(
            "recompute=full", module, loss=lambda output, _: output.logits.square().mean(), example=batch
        )
        engine.train_step(batch)
    assert ours == ["layer", "layer"]


class Drops(nn.Module):
    """A block that drops twice, by a module and by a function; with `inside`, in a checkpoint of its own."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.layer, self.drop, self.inside = nn.Linear(8, 8), nn.Dropout(0.5), inside

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self._made, x, use_reentrant=False) if self.inside else self._made(self.drop(x))
        return made

    def _made(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(nn.functional.dropout(x, 0.3, self.training)))


class Looped(nn.Module):
    """Blocks in checkpoints of the module's own, or not."""

    def __init__(self, *, recomputes: bool, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.recomputes = nn.Embedding(NUM_TOKENS, 8), recomputes
        self.blocks = nn.ModuleList(Drops(inside) for _ in range(4))
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream-2bw"])
def test_what_a_module_checkpoints_itself_is_run_again_with_its_masks_and_its_weights(schedule: str) -> None:
    """While a microbatch goes back others have gone forward: with other masks, and under 2BW with newer weights."""
    states = []
    for recomputes in (False, True):
        engine = an_engine(f"pp=2,schedule={schedule},microbatches=4", Looped(recomputes=recomputes))
        for step in range(3):
            engine.train_step(tokens(seed=step))
        engine.flush()
        states.append(engine.state_dict())
    assert all(torch.equal(each, states[1][name]) for name, each in states[0].items())


def test_what_drops_inside_of_a_checkpoint_of_a_module_drops_the_same_again() -> None:
    """There nobody answers for torch's functions in the second forward: so nobody does in the first."""
    plain, module = (Looped(recomputes=False, inside=True) for _ in range(2))
    engine = an_engine("microbatches=1", module)
    torch.manual_seed(7)
    engine.train_step(tokens())
    torch.manual_seed(7)
    total, number = token_loss(plain(tokens()["ids"]), tokens())
    (total / number).backward()  # type: ignore[no-untyped-call]
    found, wanted = engine.gradients(), gradients_of(dict(plain.named_parameters()))
    assert all(torch.allclose(found[name], each, atol=1e-6) for name, each in wanted.items())


class Latents(nn.Module):
    """Attention to one tensor as keys and values, which are projected together as long as they are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = seen = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x * 0.5, seen, seen, need_weights=False)[0]
        return self.head(x)  # type: ignore[no-any-return]


def _latents() -> Latents:
    torch.manual_seed(5)
    return Latents()


def test_a_tensor_that_is_given_twice_is_one_tensor_again() -> None:
    with an_engine("recompute=full,microbatches=2", _latents()) as engine:
        engine.train_step(tokens())
        again = engine.train_step(tokens())
    with an_engine("microbatches=2", _latents()) as plain:
        plain.train_step(tokens())
        assert plain.train_step(tokens()) == again


def test_some_layers_of_each_stage_are_recomputed() -> None:
    calls: list[str] = []  # No dictionary: its entries are as they were after a second forward.
    net = Net(num_blocks=6)
    for name, block in net.blocks.named_children():
        block.get_submodule("0").register_forward_hook(lambda *_, name=name: calls.append(name))
    engine = an_engine("pp=2,microbatches=2,layers=4+3,recompute=full,recompute_layers=1", net)
    calls.clear()
    engine.train_step(tokens())
    assert sorted(name for name, count in Counter(calls).items() if count > 2) == ["0", "3"]


def test_what_is_kept_is_said_of_a_step() -> None:
    kept = {}
    for kind in KINDS:
        engine = an_engine(f"recompute={kind}", Gated())
        engine.train_step(tokens(), trace=True)
        assert engine.trace is not None
        kept[kind] = max(each.num_bytes for each in engine.trace.holdings if each.owner == ACTIVATIONS)
    assert kept["full"] < kept["selective"] < kept["none"]


def test_evaluations_keep_nothing_and_recompute_nothing() -> None:
    engine = an_engine("recompute=full", Net(num_blocks=4))
    engine.train_step(tokens())
    with Matmuls() as found:
        engine.evaluate(tokens())
    other = an_engine("recompute=none", Net(num_blocks=4))
    with Matmuls() as plain:
        other.evaluate(tokens())
    assert found.count == plain.count
    assert gradients_of(engine.parameters)


def test_what_a_trial_on_shapes_multiplies_is_not_given_again() -> None:
    # Found by plans of random questions: under cp the last stage tries its loss on shapes within its first forward.
    first, second = recalling()
    values, weight = torch.randn(2, 4), torch.randn(4, 4)
    with first:
        torch.empty(3, 4, device="meta") @ torch.empty(4, 4, device="meta")
        made = values @ weight
    with second:
        assert torch.equal(values @ weight, made)
