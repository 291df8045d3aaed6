"""Weights of a mesh that live on the host: the same training bit for bit, where they are when, what is kept there."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwise.cluster.catalogue import get_device
from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.model.load import load_model
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.loss import next_token_loss
from shardwise.planner.account import hold
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question, usual_software
from shardwise.ranks.spawn import Ranks
from shardwise.states import host as room
from shardwise.states.optimizers import owners
from shardwise.states.tiers import host_states as states
from shardwise.torch_private import without_subclasses
from tests.engine import going_on
from tests.stages.small import small_matrices


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def make_engine(
    plan: str, model: str = "dense", optimizer: str = "adamw", clip: float | None = None, seed: int = 0
) -> Engine:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    module = going_on.make_module("two layers" if model == "halves" else model, seed)
    return parallelize(
        module.bfloat16() if model == "halves" else module,
        plan,
        loss=next_token_loss,
        optimizer=going_on.OPTIMIZERS[optimizer],
        example=going_on.batch(0),
        clip=clip,
        bucket_bytes=1500,
        verify=False,
    )


def run(plan: str, model: str, optimizer: str, clip: float | None) -> tuple[Any, ...]:
    """Losses, an evaluation, norms; weights, gradients, what optimizers remember; and the bytes on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "STAGING_BYTES", 2048)
        patch.setattr(room, "DEFERRED_FREE_BYTES", 1024)
        patch.setattr(owners, "EXCHANGED_BYTES", 2048)
        with make_engine(plan, model, optimizer, clip) as engine:
            engine.states.data.keep_gradients()
            losses = going_on.train(engine, 0, 1)
            norm, evaluated = engine.gradient_norm, engine.evaluate(going_on.batch(7))
            losses += going_on.train(engine, 1, 1)
            weights = {name: each.clone() for name, each in engine.state_dict().items()}
            gradients = {name: each.clone() for name, each in engine.gradients().items()}
            remembered = engine.optimizer_state_dict()["state"]
            return (losses, evaluated, norm), weights, gradients, remembered, engine.host_bytes


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert ours[0] == theirs[0]
    for mine, other in zip(ours[1:3], theirs[1:3], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())
    assert ours[3].keys() == theirs[3].keys()
    for name, entries in theirs[3].items():
        assert all(torch.equal(ours[3][name][key], each) for key, each in entries.items()), name


@pytest.mark.parametrize(
    ("plan", "host", "model", "optimizer", "clip"),
    [
        ("dp=2,zero=3,microbatches=2", "offload.parameters=1", "two layers", "adamw", 0.1),
        ("dp=2,microbatches=4", "offload.parameters=1,offload.optimizer=1", "two layers", "sgd", 0.1),
        (
            "dp=2,zero=2,microbatches=2,recompute=full,precision=bf16",
            "offload.parameters=1",
            "two layers",
            "adamw",
            0.1,
        ),
        pytest.param(
            "dp=2,zero=3,microbatches=2", "offload.parameters=1", "two layers", "muon", 0.1, marks=pytest.mark.whole
        ),
        ("tp=2", "offload.parameters=0.5", "two layers", "adafactor", None),
        pytest.param(
            "tp=2,sp=true,microbatches=2",
            "offload.parameters=1,offload.activations=1",
            "two layers",
            "adamw",
            0.1,
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "cp=2,zero=3,microbatches=2", "offload.parameters=1", "two layers", "adamw", None, marks=pytest.mark.whole
        ),
        ("dp=2,ep=2,zero=1,microbatches=2", "offload.parameters=1", "experts", "adamw", 0.1),
        # Weights of 16 bits have copies in full precision.
        ("dp=2,zero=3,microbatches=2,precision=bf16", "offload.parameters=1", "halves", "adamw", 0.1),
        pytest.param(
            "dp=2,zero=1,microbatches=2,precision=bf16",
            "offload.parameters=0.5",
            "halves",
            "sgd",
            None,
            marks=pytest.mark.whole,
        ),
        ("pp=2,microbatches=2,precision=bf16", "offload.parameters=1", "halves", "adamw", None),
    ],
)
def test_two_ranks_train_to_the_same_bits(
    plan: str, host: str, model: str, optimizer: str, clip: float | None, two: Ranks
) -> None:
    ours = two.run(run, f"{plan},{host}", model, optimizer, clip)
    for mine, other in zip(ours, two.run(run, plan, model, optimizer, clip), strict=True):
        assert_same(mine, other)
        assert mine[4] > 0 == other[4]


@pytest.mark.parametrize(
    ("plan", "optimizer", "clip"),
    [
        pytest.param("dp=4,zero=3,zero_group=2,microbatches=2", "adamw", 0.1, marks=pytest.mark.whole),
        pytest.param("dp=4,microbatches=2", "sgd", None, marks=pytest.mark.whole),
        pytest.param("dp=2,pp=2,schedule=zb-v,microbatches=4,zero=1", "sgd", 0.1, marks=pytest.mark.whole),
    ],
)
def test_four_ranks_train_to_the_same_bits(plan: str, optimizer: str, clip: float | None, four: Ranks) -> None:
    ours = four.run(run, f"{plan},offload.parameters=1", "two layers", optimizer, clip)
    for mine, other in zip(ours, four.run(run, plan, "two layers", optimizer, clip), strict=True):
        assert_same(mine, other)
        assert mine[4] > 0


class Doubled(nn.Module):
    """Blocks that use their weight twice: its gradient is added by hand where a backward has two halves.

    The last block's weight is used outside of it too, and the second is frozen. One is never used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.idle = nn.Linear(8, 8)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(torch.tanh(block(x)))
        return x @ self.blocks[-1].get_parameter("weight").t()


def doubled(plan: str) -> tuple[dict[str, Tensor], int]:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8)}
    loss, optimizer = (lambda output, _: output.square().mean()), going_on.OPTIMIZERS["adamw"]
    with parallelize(Doubled(), plan, loss=loss, optimizer=optimizer, example=batch, bucket_bytes=300) as engine:
        for _ in range(2):
            engine.train_step(batch)
        return {name: each.clone() for name, each in engine.state_dict().items()}, engine.host_bytes


@pytest.mark.parametrize("zero", ["", ",zero=3"])
def test_weights_that_are_used_twice_or_never_are_updated_as_without_a_host(zero: str, four: Ranks) -> None:
    plan = f"dp=2,pp=2,microbatches=4,schedule=zb-h1{zero}"
    ours, theirs = four.run(doubled, f"{plan},offload.parameters=1"), four.run(doubled, plan)
    for (mine, num_bytes), (other, _) in zip(ours, theirs, strict=True):
        assert all(torch.equal(each, other[name]) for name, each in mine.items())
        assert num_bytes > 0


class Seen(NamedTuple):
    """The most that was on the device of the weights that live on the host, and of gradients; and afterwards."""

    weights: int
    gradients: int
    weights_after: int
    gradients_after: int
    layer: int
    outside: int
    largest: int
    in_trace: float


def look(plan: str) -> Seen:
    """What is on the device while a step goes on."""
    engine = make_engine(f"{plan},offload.parameters=1")
    with engine:
        data = engine.states.data
        assert all(bucket.is_offloaded for bucket in data.buckets)
        assert sum(bucket.weights.num_bytes for bucket in data.buckets) == 0
        most = [0, 0]

        def note(*_: object) -> None:
            held = data.held()
            most[:] = [max(most[0], held.parameters), max(most[1], held.gradients)]

        def passed_on(gradient: Tensor) -> Tensor:  # A hook that only looks would be refused.
            note()
            return gradient

        for module in engine.module.modules():
            module.register_forward_pre_hook(note)
        for each in engine.parameters.values():
            each.register_hook(passed_on)  # type: ignore[no-untyped-call]
        engine.train_step(going_on.batch(0))
        engine.train_step(going_on.batch(1), trace=True)
        engine.flush()
        assert engine.trace is not None
        with without_subclasses():  # Else a look at a gradient is refused.
            assert all(each.grad is None for each in engine.parameters.values())
        wholes = {bucket: bucket.weights.whole_bytes for bucket in data.buckets}
        layer = sum(each for bucket, each in wholes.items() if "layers.1." in bucket.layout.slots[0].name)
        outside = sum(each for bucket, each in wholes.items() if "layers." not in bucket.layout.slots[0].name)
        traced = [each for each in engine.trace.holdings if each.owner in ("parameters", "gradients")]
        held, largest = data.held(), max(wholes.values())
        # The trace is of all ranks, which have the same buffers.
        buffers = sum(each.nbytes for each in engine.buffers.values()) * len({each.rank for each in traced})
        told = sum(each.num_bytes for each in traced) - buffers
        return Seen(most[0], most[1], held.parameters, held.gradients, layer, outside, largest, told)


@pytest.mark.parametrize("plan", ["dp=2,microbatches=2", "dp=2,zero=3,microbatches=2"])
def test_weights_and_gradients_are_on_the_device_for_their_use_and_for_no_longer(plan: str, two: Ranks) -> None:
    for seen in two.run(look, plan):
        # A layer, the next, and what is outside of layers; where shards are gathered, those of the next two too.
        assert 0 < seen.weights <= (3 if "zero=3" in plan else 2) * seen.layer + 2 * seen.outside
        # Of buckets: one that fills, the next, and two that are summed.
        assert 0 < seen.gradients <= 4 * seen.largest
        assert (seen.weights_after, seen.gradients_after, seen.in_trace) == (0, 0, 0)


def test_one_process_has_them_there_for_their_use_and_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STAGING_BYTES", 2048)
    monkeypatch.setattr(room, "DEFERRED_FREE_BYTES", 0)
    seen = look("microbatches=2")
    # What is updated in the backward stays until all of its chunk is: a bucket of the layer before.
    assert 0 < seen.weights <= 2 * seen.layer + 2 * seen.outside + seen.largest
    assert (seen.weights_after, seen.gradients_after, seen.in_trace) == (0, 0, 0)


def offloaded_layers(plan: str) -> list[str]:
    engine = make_engine(plan)
    with engine:
        names = [
            slot.name for bucket in engine.states.data.buckets if bucket.is_offloaded for slot in bucket.layout.slots
        ]
        return sorted({".".join(name.split(".")[:2]) for name in names if name.startswith("layers.")})


def test_a_part_of_them_is_that_of_every_other_layer(two: Ranks) -> None:
    assert two.run(offloaded_layers, "dp=2,zero=3,offload.parameters=0.4") == [["layers.0", "layers.2"]] * 2


def bytes_on_host(plan: str) -> int:
    with make_engine(plan) as engine:
        going_on.train(engine, 0, 1)
        return engine.host_bytes


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2",
        "dp=2,zero=1,precision=bf16",
        *(pytest.param(each, marks=pytest.mark.whole) for each in ("cp=2,zero=3", "tp=2")),
    ],
)
def test_the_planner_counts_what_the_engines_keep_there(plan: str, two: Ranks) -> None:
    _, config = config_for(going_on.MODELS["dense"], None)
    wide = usual_software(get_device("cpu"), is_wide=True)  # The module is in fp32, also if it computes in bf16.
    question = make_question(load_model(config), cluster="2xcpu", batch=8, sequence=8, software=wide)
    text = f"{plan},offload.parameters=1"
    (expected,) = [rank.on_host for rank in hold(question, Plan.parse(text))]
    # Under tp norms stay on the device: ranks have parts of their gradients' sums.
    assert two.run(bytes_on_host, text) == pytest.approx([expected] * 2, rel=0.05)


def go_on(first: str, second: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses under one plan and, from its state, another; and what the second holds in parts."""
    with make_engine(first, "two layers", clip=0.5) as engine:
        losses = going_on.train(engine, 0, 1)
        weights = {name: each.clone() for name, each in engine.state_dict().items()}
        state = engine.optimizer_state_dict()
    engine = make_engine(second, "two layers", clip=0.5, seed=1)
    with engine:
        going_on.train(engine, 0, 1)
        engine.load_state_dict(weights)
        engine.load_optimizer_state_dict(state)
        losses += going_on.train(engine, 1, 2)
        pieces = {f"{name}+{start}": numbers.clone() for name, _, start, numbers in engine.states.data.wholes.pieces()}
        parts = {name: each.clone() for name, each in engine.state_dict(sharded=True).items()}
        return losses, pieces | parts


@pytest.mark.parametrize(
    ("first", "second", "plain"),
    [
        ("dp=2,zero=3,offload.parameters=1", "dp=2,zero=1", "dp=2,zero=1"),
        pytest.param("dp=2", "dp=2,zero=2,offload.parameters=1", "dp=2,zero=2", marks=pytest.mark.whole),
    ],
)
def test_a_state_goes_from_a_plan_with_weights_on_the_host_to_another(
    first: str, second: str, plain: str, two: Ranks
) -> None:
    ours = two.run(go_on, first, second)
    for (losses, held), (others, expected) in zip(ours, two.run(go_on, first.partition(",off")[0], plain), strict=True):
        assert losses == others
        assert all(torch.equal(each, expected[name]) for name, each in held.items())


def not_finite(plan: str) -> dict[str, Tensor]:
    """Train, with a step between that is not finite."""
    with make_engine(plan, "two layers") as engine:
        going_on.train(engine, 0, 1)
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        engine.load_state_dict({name: each * torch.nan for name, each in before.items()})
        engine.train_step(going_on.batch(1))
        assert not engine.was_finite
        engine.load_state_dict(before)
        going_on.train(engine, 1, 1)
        return {name: each.clone() for name, each in engine.state_dict().items()}


def test_a_step_that_is_not_finite_leaves_all_as_it_was(two: Ranks) -> None:
    plan = "dp=2,zero=3,microbatches=2"
    ours, theirs = two.run(not_finite, f"{plan},offload.parameters=1"), two.run(not_finite, plan)
    assert all(torch.equal(each, theirs[0][name]) for name, each in ours[0].items())


def left(plan: str) -> bool:
    """Whether the module has the newest weights when it is over: those on the host."""
    engine = make_engine(plan, "two layers")
    with engine:
        engine.train_step(going_on.batch(0))
        newest = {name: each.clone() for name, each in engine.numbers.items()}
    return all(torch.equal(each.detach(), newest[name]) for name, each in engine.parameters.items())


def test_when_it_is_over_the_module_has_the_weights_on_the_host(two: Ranks) -> None:
    assert all(two.run(left, "dp=2,zero=1,offload.parameters=1"))


def refused(plan: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "available_bytes", lambda: 5000)
        with pytest.raises(ShardwiseError) as caught:
            make_engine(plan)
    return f"{caught.value.problem}; {caught.value.remedy}"


def test_a_host_without_room_is_refused_by_all_ranks_before_anything_moves(two: Ranks) -> None:
    said = two.run(refused, "dp=2,zero=1,offload.parameters=1")
    assert len(set(said)) == 1
    assert said[0].startswith("offload.parameters=1 of 2 ranks of this machine needs ")
    assert said[0].endswith(", or zero=3")
