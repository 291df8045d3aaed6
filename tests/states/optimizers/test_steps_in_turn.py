"""Optimizers that update some parameters at a time are told from those that must have all of them in one call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardwise.states.optimizer_copy import leaving_no_trace
from shardwise.states.optimizers.steps_in_turn import works_in_turn
from shardwise.states.tiers.step_numbers import StepNumbers


class Counted(SGD):
    """Smaller and smaller steps."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"] / (self.num_steps + group["steps"]))
        return closure


class CountedByTensor(Counted):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.num_steps = int(self.count)
        return super().step(closure)


class Remembering(SGD):
    """Momentum in a dictionary that steps fill."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.kept: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.kept.setdefault(each, torch.zeros_like(each))
                each.sub_(kept.mul_(0.9).add_(each.grad), alpha=group["lr"])
        return closure


class Around(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        self.inner = Adam(params, lr=lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("kind", "works"), [(AdamW, True), (Counted, True), (CountedByTensor, False), (Remembering, False), (Around, True)]
)
def test_what_is_kept_elsewhere_than_in_state_and_numbers_is_found(kind: Any, works: bool) -> None:
    weights = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))]
    optimizer: Any = kind([{"params": [each]} for each in weights], lr=0.1)
    assert works_in_turn(optimizer) is works
    assert all(float(each.detach().sum()) == each.numel() for each in weights)
    assert not optimizer.state
    assert not getattr(optimizer, "num_steps", 0)


def test_calls_of_one_step_count_once_and_what_others_set_stays() -> None:
    optimizer = Counted([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    numbers = StepNumbers(optimizer)
    for _ in range(3):
        with numbers.call(1):
            optimizer.step()
    assert (optimizer.num_steps, optimizer.param_groups[0]["steps"]) == (1, 1)
    optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(2):
        with numbers.call(2):
            optimizer.step()
    assert (optimizer.num_steps, optimizer.param_groups[0]) == (
        2,
        {**optimizer.param_groups[0], "steps": 2, "lr": 0.01},
    )
    optimizer.num_steps = 7
    with numbers.call(2):
        assert optimizer.num_steps == 7


@pytest.mark.parametrize("kind", [Counted, Around])
def test_what_comes_into_the_state_while_a_copy_is_tried_stays(kind: Any) -> None:
    """A script sets a rate, and its optimizer is tried again: state of the last step may be on its way to the host."""
    weight = nn.Parameter(torch.ones(3))
    optimizer: Any = kind([weight], lr=0.1)
    optimizer.state[weight] = {"exp_avg": torch.zeros(3)}
    with leaving_no_trace(optimizer):
        optimizer.state[weight]["exp_avg"].fill_(7)
    assert optimizer.state[weight]["exp_avg"].tolist() == [7, 7, 7]
