"""Weights that live on the host: the same training bit for bit, where they are when, and what is kept there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.model.load import load_model
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.loss import next_token_loss
from shardwise.planner.account import hold
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.ranks.spawn import Ranks
from shardwise.states import host as room
from shardwise.states.tiers import host_states as states
from shardwise.states.tiers.choose_offloaded import choose_fraction
from tests.engine import going_on
from tests.stages.small import small_matrices

STEPS = 2


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def make_engine(plan: str, optimizer: str = "adamw", clip: float | None = None, seed: int = 0) -> Engine:
    return parallelize(
        going_on.make_module("dense", seed),
        plan,
        loss=next_token_loss,
        optimizer=going_on.OPTIMIZERS[optimizer],
        example=going_on.batch(0),
        clip=clip,
    )


def run(plan: str, optimizer: str = "adamw", clip: float | None = None) -> tuple[Any, ...]:
    """Losses, weights, gradients, what optimizers remember, an evaluation, and the bytes on the host."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "STAGING_BYTES", 2048)
        patch.setattr(room, "DEFERRED_FREE_BYTES", 1024)
        with make_engine(plan, optimizer, clip) as engine:
            engine.states.data.keep_gradients()
            losses = going_on.train(engine, 0, STEPS)
            now = {name: each.clone() for name, each in engine.state_dict().items()}
            assert all(torch.equal(each, now[name]) for name, each in engine.numbers.items())
            gradients = {name: each.clone() for name, each in engine.gradients().items()}
            evaluated = engine.evaluate(going_on.batch(7))
            return losses, now, gradients, engine.optimizer_state_dict()["state"], evaluated, engine.host_bytes


def test_gradients_that_were_not_kept_are_refused_with_what_keeps_them() -> None:
    plan = "microbatches=2,offload.parameters=1"
    with make_engine(plan) as engine:
        going_on.train(engine, 0, 1)
        with pytest.raises(ShardwiseError, match=r"is gone: with offload\.parameters a weight is updated as soon as"):
            engine.gradients()
    with make_engine(plan, clip=float("inf")) as engine:
        going_on.train(engine, 0, 1)
        assert engine.gradients().keys() == dict(engine.module.named_parameters()).keys()


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert (ours[0], ours[4]) == (theirs[0], theirs[4])
    for mine, other in zip(ours[1:3], theirs[1:3], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())
    for name, entries in theirs[3].items():
        assert all(torch.equal(ours[3][name][key], each) for key, each in entries.items()), name


@pytest.mark.parametrize(
    ("plan", "host", "optimizer", "clip"),
    [
        ("microbatches=4", "offload.parameters=1,offload.activations=1", "sgd", 0.1),
        ("microbatches=2,recompute=full", "offload.parameters=0.5", "adamw", None),
        ("microbatches=2,precision=bf16", "offload.parameters=1,offload.optimizer=1", "adamw", 0.1),
        ("pp=2,schedule=zb-v,microbatches=4", "offload.parameters=1,offload.optimizer=1", "adamw", None),
        ("microbatches=2", "offload.parameters=1", "muon", None),
    ],
)
def test_one_process_trains_to_the_same_bits(plan: str, host: str, optimizer: str, clip: float | None) -> None:
    ours, theirs = run(f"{plan},{host}", optimizer, clip), run(plan, optimizer, clip)
    assert_same(ours, theirs)
    assert ours[5] > 0 == theirs[5]


def test_ranks_train_to_the_same_bits(four: Ranks) -> None:
    plan = "pp=4,microbatches=4"
    for mine, other in zip(four.run(run, f"{plan},offload.parameters=1"), four.run(run, plan), strict=True):
        assert_same(mine, other)
        assert mine[5] > 0


class Doubled(nn.Module):
    """Blocks that use their weight twice: its gradient is added by hand where a backward has two halves.

    The last uses that of another as well, without calling it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(torch.tanh(block(x)))
        return x @ self.blocks[-1].get_parameter("weight").t()


def doubled(plan: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8)}
    loss, optimizer = (lambda output, _: output.square().mean()), going_on.OPTIMIZERS["sgd"]
    with parallelize(Doubled(), plan, loss=loss, optimizer=optimizer, example=batch) as engine:
        for _ in range(STEPS):
            engine.train_step(batch)
        return {name: each.clone() for name, each in engine.state_dict().items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_weight_that_is_used_twice_is_updated_once(schedule: str) -> None:
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    ours, theirs = doubled(f"{plan},offload.parameters=1"), doubled(plan)
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())


@pytest.mark.parametrize("plan", ["microbatches=2", "pp=2,microbatches=2,layers=2+2"])
def test_the_planner_counts_what_the_engines_keep_there(plan: str) -> None:
    _, config = config_for(going_on.MODELS["dense"], None)
    question = make_question(load_model(config), cluster="4xcpu", batch=8, sequence=8)
    for host in ("offload.parameters=1", "offload.parameters=1,offload.optimizer=1"):
        expected = sum(rank.on_host for rank in hold(question, Plan.parse(f"{plan},{host}")))
        if "pp" in plan:  # What stages share stays on the device, here the embedding: weight, gradient and no state.
            expected -= 8 * 2 * 53 * 16 + 8 * 53 * 16
        with make_engine(f"{plan},{host}") as engine:
            engine.train_step(going_on.batch(0))
            assert engine.host_bytes == pytest.approx(expected, rel=0.05 if "pp" not in plan else 0.1)


def test_a_state_goes_from_a_plan_with_weights_on_the_host_to_one_without_and_back() -> None:
    first, second = "microbatches=2,offload.parameters=1", "microbatches=2"
    with make_engine(second) as engine:
        expected = going_on.train(engine, 0, 3)
    for before, after in ((first, second), (second, first)):
        with make_engine(before) as engine:
            losses = going_on.train(engine, 0, 1)
            kept = {name: each.clone() for name, each in engine.state_dict().items()}
            state = engine.optimizer_state_dict()
        with make_engine(after, seed=1) as engine:
            engine.load_state_dict(kept)
            engine.load_optimizer_state_dict(state)
            assert losses + going_on.train(engine, 1, 2) == expected


def test_units_are_chosen_evenly_until_they_have_the_part_that_was_asked_for() -> None:
    units = {str(number): [nn.Parameter(torch.zeros(4))] for number in range(4)}
    every = [own[0] for own in units.values()]
    for part, chosen in ((0.0, []), (0.3, [1, 3]), (0.5, [1, 3]), (0.6, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        found = choose_fraction(units, part)
        assert [number for number, each in enumerate(every) if any(each is one for one in found)] == chosen
    tied = {"a": [every[0]], "b": [every[1]], "c": [every[0]]}
    assert len(choose_fraction(tied, 1.0)) == 2


def test_a_host_without_room_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 5000)
    with pytest.raises(ShardwiseError, match=r"offload.parameters=1 of 1 rank of this machine needs"):
        make_engine("offload.parameters=1")
