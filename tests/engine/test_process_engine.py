"""The engine of many processes does what that of one does: state, traces, clipping, frozen parts, modules on meta."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.stages.split.sources import storage_of
from shardwise.stages.stage import Batch
from shardwise.trace.attribution import idle_by_cause
from shardwise.trace.events import Lane
from tests.same import Trained, assert_same, train, train_plain
from tests.stages.pieces import Net

IGNORED = -100
NUM_TOKENS = 11


class Normed(nn.Module):
    """Blocks with batch norm, a buffer of the root's own, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, NUM_TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x.flatten(0, 1)).view_as(x) * self.scale
        return self.head(x)  # type: ignore[no-any-return]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def token_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A sum and its number, of which microbatches have different ones."""
    labels: Tensor = batch["labels"].flatten()
    total = cross_entropy(output.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def tokens(size: int = 8, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Of the first sequences hardly a token counts."""
    ids = torch.randint(0, NUM_TOKENS, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 1:].clone()
    labels[: size // 2, 1:] = IGNORED
    return {"ids": ids[:, :-1], "labels": labels}


def an_engine(plan: str, build: Callable[[], nn.Module] = lambda: Net(num_blocks=4), **changed: Any) -> Engine:
    torch.set_num_threads(1)
    given: dict[str, Any] = {"loss": token_loss, "optimizer": sgd, "example": tokens(), **changed}
    return parallelize(build(), plan, **given)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, wanted in expected.items():
        assert float((found[name] - wanted).double().norm()) <= tolerance * (1e-4 + float(wanted.double().norm())), name


# State.


def states(plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """After a step: the whole state, this rank's part of it, and the parameters that it holds."""
    engine = an_engine(plan, Normed)
    engine.train_step(tokens())
    whole, part = engine.state_dict(), engine.state_dict(sharded=True)
    engine.close()
    return {name: each.clone() for name, each in whole.items()}, part, list(engine.parameters)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_state_is_whole_on_every_rank_or_each_ranks_own_part(schedule: str, two: Ranks) -> None:
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    expected, alone, _ = states(plan)
    assert list(expected) == list(Normed().state_dict())
    assert alone.keys() == expected.keys()
    results = two.run(states, plan)
    for whole, part, held in results:
        assert_close(whole, expected)
        assert 0 < len(part) < len(expected)
        assert set(held) <= set(part)
        assert all(torch.equal(each, whole[name]) for name, each in part.items())
        # Tied: wherever one of its names is, both are.
        assert ("embedding.weight" in part) == ("head.weight" in part)
        assert "scale" in part
    assert {name for _, part, _ in results for name in part} == set(expected)
    assert int(results[0][0]["blocks.0.1.num_batches_tracked"]) == 4


def load_and_go_on(plan: str, state: Any, sharded: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Load a state, or this rank's part of it, into an engine that has gone astray, and train on."""
    engine = an_engine(plan, Normed)
    engine.train_step(tokens(seed=9))
    if sharded:
        state = {name: each for name, each in state.items() if name in engine.state_dict(sharded=True)}
    engine.load_state_dict(state)
    losses = [engine.train_step(tokens(seed=seed)) for seed in (1, 2)]
    whole = {name: each.clone() for name, each in engine.state_dict().items()}
    engine.close()
    return losses, whole


@pytest.mark.parametrize("schedule", ["zb-v", "pipedream-2bw"])
def test_a_state_that_was_saved_under_one_plan_goes_on_under_another(schedule: str, two: Ranks) -> None:
    saved, _, _ = states("pp=1,microbatches=4")
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    losses, expected = load_and_go_on(plan, saved, False)
    for sharded in (False, True):
        for found, whole in two.run(load_and_go_on, plan, saved, sharded):
            assert found == pytest.approx(losses, rel=1e-5)
            assert_close(whole, expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda state: {**state, "blocks.0.0.wieght": torch.zeros(8, 8)},
            "unknown entry of a state 'blocks.0.0.wieght'",
        ),
        (
            lambda state: {name: each for name, each in state.items() if not name.startswith("blocks.3.0")},
            "the state lacks blocks.3.0.weight, one of 2 missing of the 31 entries that are held here",
        ),
        (
            lambda state: {**state, "blocks.2.0.bias": torch.zeros(9)},
            "blocks.2.0.bias has shape (9,) in the state and (8,) in the module",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(change: Any, text: str) -> None:
    engine = an_engine("pp=2,microbatches=4", Normed)
    before = {name: each.clone() for name, each in engine.state_dict().items()}
    with pytest.raises(ShardwiseError) as caught:
        engine.load_state_dict(change({name: torch.zeros_like(each) for name, each in before.items()}))
    assert caught.value.problem.startswith(text)
    assert all(torch.equal(each, before[name]) for name, each in engine.state_dict().items())


def statistics(momentum: float | None) -> list[dict[str, Tensor]]:
    """The statistics of batch norm on this rank after each of two steps that change no weight."""

    def build() -> nn.Module:
        module = Normed()
        for each in module.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.momentum = momentum
        return module

    engine = an_engine(
        "pp=2,microbatches=4,schedule=chimera", build, optimizer=lambda parameters: SGD(parameters, lr=0.0)
    )
    found = []
    for seed in range(2):
        engine.train_step(tokens(seed=seed))
        found.append({name: each.clone() for name, each in engine.buffers.items()})
    engine.close()
    return found


@pytest.mark.parametrize(("momentum", "tolerance"), [(None, 1e-5), (0.01, 0.01)])
def test_copies_of_a_batch_norm_have_what_all_of_them_have_seen(
    momentum: float | None, tolerance: float, two: Ranks
) -> None:
    # In one process the copies are one module. Without momentum the order of microbatches does not matter.
    expected = statistics(momentum)
    first, second = two.run(statistics, momentum)
    for ours, theirs, wanted in zip(first, second, expected, strict=True):
        assert ours.keys() == theirs.keys() == wanted.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name])
            assert torch.allclose(value.double(), wanted[name].double(), rtol=tolerance, atol=tolerance * 0.1), name
    assert int(first[1]["blocks.0.1.num_batches_tracked"]) == 8


# Gradients of the whole batch.


def clipped(plan: str) -> Trained:
    with an_engine(plan, clip=0.05) as engine:
        return train(engine, [tokens(seed=seed) for seed in range(2)])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_tokens_weigh_the_same_and_clipping_is_by_the_global_norm(schedule: str, two: Ranks) -> None:
    expected = train_plain(Net(num_blocks=4), [tokens(seed=seed) for seed in range(2)], token_loss, sgd, clip=0.05)
    assert min(expected.norms) > 0.05
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    assert_same(clipped(plan), expected, 1e-5)
    for found in two.run(clipped, plan):
        assert_same(found, expected, 1e-5, is_part=True)


def partly_frozen(plan: str) -> tuple[float, dict[str, Tensor], bool]:
    """The second half of the blocks, and the weight at both ends, learn nothing."""

    def build() -> nn.Module:
        net = Net(num_blocks=4)
        for part in (net.blocks[2], net.blocks[3], net.embedding):
            part.requires_grad_(False)
        return net

    engine = an_engine(plan, build, clip=1.0)
    loss = engine.train_step(tokens())
    gradients = {name: each.grad for name, each in engine.parameters.items() if each.grad is not None}
    engine.close()
    return loss, gradients, any(group["params"] for each in engine.optimizers for group in each.param_groups)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_rank_with_nothing_to_train_takes_part(schedule: str, two: Ranks) -> None:
    plan = f"pp=2,microbatches=4,layers=2+2,schedule={schedule}"
    loss, expected, _ = partly_frozen(plan)
    assert sorted(expected) == sorted(name for name in expected if name.startswith(("blocks.0.", "blocks.1.")))
    first, second = two.run(partly_frozen, plan)
    assert first[0] == second[0] == pytest.approx(loss, rel=1e-6)
    assert_close(first[1], expected)
    assert (second[1], first[2], second[2]) == ({}, True, False)


# Traces.


def traced(plan: str) -> Any:
    engine = an_engine(plan)
    engine.train_step(tokens())
    untraced = engine.trace
    engine.train_step(tokens(), trace=True)
    trace = engine.trace
    engine.close()
    return untraced, trace, engine.schedule.orders


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_rank_has_the_trace_of_all_by_one_clock(schedule: str, two: Ranks) -> None:
    (untraced, trace, orders), (_, other, _) = two.run(traced, f"pp=2,microbatches=4,schedule={schedule}")
    assert untraced is None
    assert trace == other
    assert (trace.name, trace.num_ranks, trace.start) == (schedule, 2, 0)
    for rank, events in enumerate(trace.compute):
        assert [event.name for event in events] == [str(each) for each in orders[rank] if each.kind in "FBIW"]
        assert all(before.end <= after.start for before, after in pairwise(events))
    ends = {event.name: event.end for event in trace.events}
    starts = {event.name: event.start for event in trace.events}
    # Nothing is computed before what it needs from the other rank has been.
    for microbatch in range(4):
        assert ends[f"0F{microbatch}"] <= starts[f"1F{microbatch}"]
    assert [event.rank for event in trace.events if event.lane is Lane.STEP] == [0, 1]
    assert sum(event.held_at_start + event.held_at_end for event in trace.events) == pytest.approx(0)
    assert len(idle_by_cause(trace)) == 2


# Modules on the meta device.


class _MostBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most memory that was ever held at once by tensors that are somewhere, made while this is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        from torch.multiprocessing.reductions import StorageWeakRef

        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta:
            storage = made.untyped_storage()
            self._alive[storage_of(made)] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return made


class Own(nn.Module):
    """A block that says itself how it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(64, 64), nn.Parameter(torch.empty(64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain, mean=3.0, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.gain


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(NUM_TOKENS, 64), *(Own() for _ in range(5)), nn.Linear(64, NUM_TOKENS))


def from_meta(plan: str, seed: int) -> tuple[dict[str, Tensor], int, int, float]:
    """The initial weights, the bytes of parameters that are here, the most bytes ever, and the loss of a step."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 77)
    batch = {"input": tokens(4, 3)["ids"]}
    with _MostBytes() as bytes_:
        engine = an_engine(plan, on_meta, loss=lambda output, _: output.square().mean(), example=batch, seed=seed)
    here = sum(each.nbytes for each in engine.module.parameters() if not each.is_meta)
    assert here == sum(each.nbytes for each in engine.parameters.values())
    weights = {name: each.clone() for name, each in engine.state_dict().items()}
    loss = engine.train_step(batch)
    engine.close()
    return weights, here, bytes_.most, loss


def test_initial_weights_depend_on_the_seed_alone_and_no_rank_ever_holds_the_whole(two: Ranks, three: Ranks) -> None:
    expected, whole, most_alone, loss = from_meta("pp=1,microbatches=4", 3)
    assert whole <= most_alone < 1.2 * whole
    other = from_meta("pp=1,microbatches=4", 4)[0]
    assert not torch.equal(other["2.inner.weight"], expected["2.inner.weight"])
    assert not torch.equal(expected["1.inner.weight"], expected["2.inner.weight"])
    assert float(expected["2.gain"].mean()) == pytest.approx(3.0, abs=0.01)
    for ranks, axes in ((two, "pp=2"), (two, "pp=2,schedule=zb-v"), (three, "pp=3")):
        plan = f"{axes},microbatches=4"
        results = ranks.run(from_meta, plan, 3)
        for weights, _, _, found in [from_meta(plan, 3), *results]:
            assert list(weights) == list(expected)
            assert all(torch.equal(each, expected[name]) for name, each in weights.items())
            assert found == pytest.approx(loss, rel=1e-5)
        assert sum(here for _, here, _, _ in results) == whole
        for _, here, most, _ in results:
            assert here < 0.7 * whole
            assert most < 0.8 * whole
