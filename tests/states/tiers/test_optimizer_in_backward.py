"""Updates under the last backwards: which begin there, and the same training bit for bit."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.engine import make_states
from shardwise.engine.engine import Engine
from shardwise.engine.loss_sum import LossSum
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.execution.step_losses import Tally
from shardwise.nets.loss import next_token_loss
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.states.buckets.make import ZeroConfig
from shardwise.states.tiers import host_states as states
from shardwise.states.tiers.host_states import HostStates
from tests.crowd import Crowds
from tests.engine import going_on
from tests.stages.small import small_matrices

STEPS = 2


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def make_engine(plan: str, optimizer: str = "adamw", clip: float | None = None) -> Engine:
    return parallelize(
        # Four layers where there are as many stages, and where most of them count.
        going_on.make_module("dense" if "zb-v" in plan or "recompute" in plan else "two layers", 0),
        plan,
        loss=next_token_loss,
        optimizer=going_on.OPTIMIZERS[optimizer],
        example=going_on.batch(0),
        clip=clip,
    )


def run(plan: str, optimizer: str = "adamw", clip: float | None = None) -> tuple[list[float], Any, Any, float]:
    """Losses, weights, what optimizers remember, and the part of the chunks that was updated before the steps ended."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    early, total = 0, 0

    def step(self: HostStates) -> None:
        nonlocal early, total
        early, total = early + sum(self._prefetch.was_asked(each) for each in self._chunks), total + len(self._chunks)
        end(self)

    def find_tally(self: LossSum) -> Tally | None:
        if find(self) is None and self._under_way is not None:
            self._under_way[1].wait()  # Else it is a matter of who is faster.
        return find(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "STAGING_BYTES", 2048)
        patch.setattr(make_states, "ZeroConfig", partial(ZeroConfig, bucket_bytes=4096))
        find = LossSum.find
        if "pp" not in plan:
            patch.setattr(LossSum, "find", find_tally)
        end = HostStates.step
        patch.setattr(HostStates, "step", step)
        with make_engine(plan, optimizer, clip) as engine:
            losses = going_on.train(engine, 0, STEPS)
            weights = {name: each.clone() for name, each in engine.state_dict().items()}
            return losses, weights, engine.optimizer_state_dict(), early / max(total, 1)


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert ours[0] == theirs[0]
    assert all(torch.equal(each, theirs[1][name]) for name, each in ours[1].items())
    for name, entries in theirs[2]["state"].items():
        assert all(torch.equal(ours[2]["state"][name][key], each) for key, each in entries.items()), name


@pytest.mark.parametrize(
    ("plan", "least"),
    [
        ("microbatches=1", 0.8),
        ("pp=2,microbatches=4,recompute=full", 0.8),
        ("pp=2,schedule=zb-v,microbatches=4", 0.5),
        ("pp=2,schedule=pipedream-2bw,microbatches=2", 0.0),
    ],
)
def test_one_process_updates_under_its_backwards_to_the_same_bits(plan: str, least: float) -> None:
    ours = run(f"{plan},offload.optimizer=1")
    assert_same(ours, run(plan))
    assert ours[3] >= least


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ("dp=4,microbatches=2", "sgd"),
        ("dp=2,zero=3", "adamw"),
        ("dp=2,pp=2,microbatches=2,zero=1", "adamw"),
        ("pp=2,microbatches=4", "sgd"),
    ],
)
def test_ranks_update_under_their_backwards_to_the_same_bits(plan: str, optimizer: str, crowds: Crowds) -> None:
    ranks = crowds.of(Plan.parse(plan).num_ranks)
    ours, theirs = ranks.run(run, f"{plan},offload.optimizer=1", optimizer), ranks.run(run, plan, optimizer)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    if "pp" not in plan:
        assert min(mine[3] for mine in ours) > 0.3


def test_matrices_are_updated_whole_under_a_backward() -> None:
    ours = run("microbatches=2,offload.optimizer=1", "muon")
    assert_same(ours, run("microbatches=2", "muon"))
    assert ours[3] >= 0.8


@pytest.mark.parametrize(
    ("plan", "optimizer", "least"),
    [("dp=2,zero=2,microbatches=2", "adamw", 0.3), ("dp=2,zero=1", "muon", 0.0)],
)
def test_two_ranks_update_under_their_backwards_to_the_same_bits(
    plan: str, optimizer: str, least: float, two: Ranks
) -> None:
    ours, theirs = two.run(run, f"{plan},offload.optimizer=1", optimizer), two.run(run, plan, optimizer)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
        assert mine[3] >= least


def test_with_clipping_updates_begin_when_the_norm_is_known() -> None:
    ours = run("microbatches=2,offload.optimizer=1", clip=0.1)
    assert_same(ours, run("microbatches=2", clip=0.1))
    assert ours[3] == 0


def test_a_loss_that_is_not_finite_updates_nothing_early() -> None:
    with make_engine("microbatches=2,offload.optimizer=1") as engine:
        going_on.train(engine, 0, 1)
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        name, parameter = list(engine.parameters.items())[-1]  # The first is tied.
        with torch.no_grad():
            parameter.view(-1)[0] = torch.nan
        engine.train_step(going_on.batch(1))
        assert not engine.was_finite
        now = engine.state_dict()
        assert all(torch.equal(each, now[other]) for other, each in before.items() if other != name)


class Again(Function):
    """A layer that is run once more in its backward, with a backward inside of that."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        found: Tensor = layer(x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.layer(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Twice(nn.Module):
    """A weight that two backwards inside of the backward have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = Again.apply(self.layer, x)  # type: ignore[no-untyped-call]
        return x


def test_a_gradient_that_grows_after_it_was_complete_is_refused() -> None:
    batch = {"x": torch.randn(2, 4)}
    engine = parallelize(
        Twice(),
        "offload.optimizer=1",
        loss=lambda output, _: output.square().mean(),
        optimizer=going_on.OPTIMIZERS["sgd"],
        example=batch,
    )
    with pytest.raises(ShardwiseError, match="was added to after it was complete"):
        engine.train_step(batch)


def test_two_versions_of_weights_are_new_before_they_change_places() -> None:
    """They are copied onto each other right after a step: an update that ran on beside it would be lost (on a GPU)."""
    plain, stale = "pp=2,microbatches=2,offload.optimizer=1", "pp=2,schedule=pipedream-2bw,microbatches=2"
    for plan, late in ((plain, True), (f"{stale},offload.optimizer=1", False)):
        with make_engine(plan) as engine:
            assert {each.is_renewed_late for each in engine.states.data.buckets} == {late}
