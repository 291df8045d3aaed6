"""The first steps are compared with those of one process: what no trial has found does not train."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

import shardwise as sw
from shardwise.engine import loss_agreement
from shardwise.engine.engine import Engine
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.stages.loss_kind import LossKind, Tried
from tests.crowd import Crowds
from tests.parity.models import make_problem

BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), "labels": torch.tensor([0, 1, 2, 0])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), 1.0
        self.act: nn.Module = nn.Tanh()
        self.offset, self.shift = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.act(self.first(x))) * self.scale + self.offset + self.shift
        return out


def among_rows(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Negatives from the batch, which parts of it do not have."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output))) + 0 * batch["labels"].sum()


def by_labels(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that find nothing, as for a mistake that nobody has thought of."""
    monkeypatch.setattr(loss_agreement, "try_loss", lambda *_, **__: Tried(LossKind.ROWS))


def engine_for(
    loss: Any = among_rows, plan: str = "microbatches=2", *, verify: bool = True, example: Any = BATCH
) -> Engine:
    torch.manual_seed(0)
    return sw.parallelize(
        Net(), plan, loss=loss, optimizer=lambda given: SGD(given, lr=0.1), example=example, verify=verify
    )


@pytest.mark.usefixtures("untried")
def test_a_step_that_is_not_that_of_one_process_is_refused_before_weights_change() -> None:
    with engine_for() as engine:
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        with pytest.raises(ShardwiseError, match=r"gradients of \d of 4 parameters differ.*The step has changed no"):
            engine.train_step(BATCH)
        assert all(torch.equal(each, before[name]) for name, each in engine.module.state_dict().items())


@pytest.mark.usefixtures("untried")
def test_with_offload_the_loss_is_compared() -> None:
    with (
        engine_for(plan="microbatches=2,offload.parameters=1.0") as engine,
        pytest.raises(ShardwiseError, match=r"the loss is [\d.]+, and [\d.]+ there"),
    ):
        engine.train_step(BATCH)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("what", ["attribute", "hook", "frozen", "mode", "mean of parts", "verify", "traced"])
def test_nothing_is_compared_that_may_differ(what: str) -> None:
    loss = (lambda output, batch: (among_rows(output, batch), 1)) if what == "mean of parts" else among_rows
    with engine_for(loss, verify=what != "verify") as engine:
        net: Any = engine.module
        if what == "attribute":
            net.scale = 2.0
        elif what == "hook":
            net.second.weight.register_hook(lambda gradient: 2 * gradient)
        elif what == "frozen":
            net.first.weight.requires_grad_(False)
        elif what == "mode":
            net.first.eval()
        engine.train_step(BATCH, trace=what == "traced")
        assert engine.execution.batches.first.compared == []


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("what", ["batch", "weights", "buffer", "loaded"])
def test_another_batch_and_other_weights_are_compared_on_a_copy(what: str) -> None:
    with engine_for() as engine:
        net: Any = engine.module
        batch = {**BATCH, "x": BATCH["x"] + 1.0} if what == "batch" else BATCH
        if what == "weights":
            net.second.weight.data.mul_(2.0)
        elif what == "buffer":
            net.offset.fill_(1.0)
        elif what == "loaded":
            engine.load_state_dict({name: 2 * each for name, each in engine.state_dict().items()})
        with pytest.raises(ShardwiseError, match="the first step under microbatches=2 is not that of one process"):
            engine.train_step(batch)


@pytest.mark.usefixtures("untried")
def test_what_goes_wrong_in_a_later_batch_is_refused_there() -> None:
    def of_some(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, batch["labels"], ignore_index=2)

    known = {**BATCH, "labels": torch.tensor([0, 1, 1, 0])}
    with engine_for(of_some, example=known) as engine:
        engine.train_step(known)
        before = engine.state_dict()
        with pytest.raises(ShardwiseError, match="step 2 under microbatches=2 is not that of one process"):
            engine.train_step({**BATCH, "labels": torch.tensor([0, 2, 2, 2])})
        assert all(torch.equal(each, before[name]) for name, each in engine.state_dict().items())


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("what", ["attribute", "layer", "mode", "frozen", "buffer"])
def test_what_a_script_sets_between_steps_ends_the_comparison(what: str) -> None:
    with engine_for(by_labels) as engine:
        net: Any = engine.module
        engine.train_step(BATCH)
        if what == "attribute":
            net.scale = 2.0
        elif what == "layer":
            net.act = nn.ReLU()
        elif what == "mode":
            net.first.eval()
        elif what == "frozen":
            net.first.weight.requires_grad_(False)
        else:
            net.shift.fill_(1.0)
        engine.train_step(BATCH)
        engine.train_step(BATCH)
        assert engine.execution.batches.first.compared == [1]


def test_what_a_step_sets_by_itself_ends_the_comparison() -> None:
    torch.manual_seed(0)
    net = Net()

    def hooked(given: Any) -> SGD:
        made = SGD(given, lr=0.1)
        made.register_step_post_hook(lambda *_: setattr(net, "scale", net.scale * 0.5))
        return made

    with sw.parallelize(net, "microbatches=2", loss=by_labels, optimizer=hooked, example=BATCH, verify=True) as engine:
        for _ in range(3):
            engine.train_step(BATCH)
        assert engine.execution.batches.first.compared == [1]


class Drops(Net):
    """Drops from what has other rows than the batch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.drop = what, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "a weight":
            hidden = functional.linear(x, self.drop(self.first.weight))
        elif self.what == "rows twice":
            one, other = self.drop(self.first(torch.cat([x, x]))).chunk(2)
            hidden = one + other
        else:
            hidden = self.drop(self.first(x.repeat(4, 1, 1))).mean(0)
        out: Tensor = self.second(self.act(hidden))
        return out


@pytest.mark.parametrize("what", ["a weight", "rows twice", "something before rows"])
def test_masks_that_each_part_draws_are_not_compared(what: str) -> None:
    torch.manual_seed(0)
    with sw.parallelize(
        Drops(what),
        "microbatches=2",
        loss=by_labels,
        optimizer=lambda given: SGD(given, lr=0.1),
        example=BATCH,
        verify=True,
    ) as engine:
        for _ in range(3):
            engine.train_step(BATCH)
        assert engine.execution.batches.first.compared == []


def test_a_step_that_raised_is_not_compared_with_the_next() -> None:
    """Step 3 is compared, and step 4 is not: what was computed for one is nothing to the other."""

    def fail(*_: object) -> dict[str, float]:
        raise ValueError("a bad metric")

    with engine_for(by_labels) as engine:
        engine.train_step(BATCH)
        engine.train_step(BATCH)
        with pytest.raises(ValueError, match="a bad metric"):
            engine.train_step(BATCH, metrics=fail)
        engine.train_step({**BATCH, "x": BATCH["x"] + 1.0})
        assert engine.execution.batches.first.compared == [1, 2]


def test_rounding_near_a_minimum_is_no_difference() -> None:
    """Gradients are what is left of terms that cancel out; in double precision something else is left."""

    def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, batch["wanted"])

    torch.manual_seed(0)
    wanted = {"x": BATCH["x"], "wanted": Net()(BATCH["x"]).detach()}
    torch.manual_seed(0)
    with sw.parallelize(
        Net(), "microbatches=4", loss=squares, optimizer=lambda given: SGD(given, lr=0.1), example=wanted
    ) as engine:
        for _ in range(3):
            engine.train_step(wanted)


@pytest.mark.parametrize("plan", ["microbatches=2", "microbatches=4,recompute=full", "pp=2,microbatches=2"])
def test_steps_that_are_right_are_taken(plan: str) -> None:
    with engine_for(by_labels, plan) as engine:
        for _ in range(18):
            engine.train_step(BATCH)
        assert engine.execution.batches.first.compared == [1, 2, 3, 5, 9, 17]
        assert not engine.execution.batches.first.is_due
        assert "compared with steps of one process, and equal: 1, 2, 3, 5, 9, 17" in engine.explain()


def compared_on_a_rank(text: str) -> list[int]:
    plan = Plan.parse(text)
    problem = make_problem("tied", plan)()
    first, *_ = problem.batches
    with sw.parallelize(
        problem.module,
        plan,
        loss=problem.loss,
        optimizer=lambda given: AdamW(given, lr=1e-3),
        example=first,
        verify=True,
    ) as engine:
        for batch in problem.batches:
            engine.train_step(batch)
        return list(engine.execution.batches.first.compared)


@pytest.mark.parametrize(
    "plan",  # The model drops activations and weights of attention.
    ["dp=2", "dp=2,zero=1", "dp=2,zero=2,offload.optimizer=1", "dp=2,zero=3", "tp=2", "tp=2,sp=true",
     "pp=2,microbatches=2", "pp=2,microbatches=4,schedule=zb-v", "dp=2,zero=3,offload.parameters=1"],
)  # fmt: skip
def test_every_kind_of_plan_is_compared(plan: str, crowds: Crowds) -> None:
    assert crowds.of(2).run(compared_on_a_rank, plan) == [[1, 2, 3]] * 2
