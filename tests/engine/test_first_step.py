"""The first step is compared with one of the whole example: what no trial has found does not train."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import shardwise as sw
from shardwise.engine import loss_agreement
from shardwise.engine.engine import Engine
from shardwise.errors import ShardwiseError
from shardwise.stages.loss_kind import LossKind, Tried

BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), "labels": torch.tensor([0, 1, 2, 0])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
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


def engine_for(loss: Any = among_rows, plan: str = "microbatches=2", *, verify: bool = True) -> Engine:
    torch.manual_seed(0)
    return sw.parallelize(
        Net(), plan, loss=loss, optimizer=lambda given: SGD(given, lr=0.1), example=BATCH, verify=verify
    )


@pytest.mark.usefixtures("untried")
def test_a_step_that_is_not_that_of_one_process_is_refused_before_weights_change() -> None:
    with engine_for() as engine:
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        with pytest.raises(ShardwiseError, match=r"gradients of \d of 4 parameters differ.*No weight was changed"):
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
@pytest.mark.parametrize("what", ["batch", "weights", "loaded", "attribute", "hook", "mean of parts", "verify"])
def test_nothing_is_compared_that_may_differ(what: str) -> None:
    loss = (lambda output, batch: (among_rows(output, batch), 1)) if what == "mean of parts" else among_rows
    with engine_for(loss, verify=what != "verify") as engine:
        net: Any = engine.module
        batch = BATCH
        if what == "batch":
            batch = {**BATCH, "x": BATCH["x"] + 1.0}
        elif what == "weights":
            net.second.weight.data.mul_(2.0)
        elif what == "loaded":
            engine.load_state_dict({name: 2 * each for name, each in engine.state_dict().items()})
        elif what == "attribute":
            net.scale = 2.0
        elif what == "hook":
            net.second.weight.register_hook(lambda gradient: 2 * gradient)
        engine.train_step(batch)


@pytest.mark.parametrize("plan", ["microbatches=2", "microbatches=4,recompute=full", "pp=2,microbatches=2"])
def test_a_step_that_is_right_is_taken(plan: str) -> None:
    with engine_for(by_labels, plan) as engine:
        assert engine.execution.batches.first.is_due
        engine.train_step(BATCH)
        assert not engine.execution.batches.first.is_due
