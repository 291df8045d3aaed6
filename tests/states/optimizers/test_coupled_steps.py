"""Optimizers whose step on one parameter depends on others are told from those that take each by itself."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from shardwise.states.coupled_steps import draws, is_coupled, is_elementwise


class Lamb(SGD):
    """By the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in every]).norm().clamp(min=1.0)
        for each in every:
            each.sub_(each.grad / norm)
        return closure


class FirstGroup(SGD):
    """At a rate that the first group has found."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rate = sum(float(each.grad.square().sum()) for each in self.param_groups[0]["params"])
        for group in self.param_groups[1:]:
            for each in group["params"]:
                each.sub_(each.grad, alpha=rate)
        return closure


class Clipped(SGD):
    """Each by its own norm, with a count of its own."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.counts = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.counts[0] += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad / each.grad.norm().clamp(min=1.0) / self.counts[0])
        return closure


class Noisy(SGD):
    """Noise beside the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad + torch.randn_like(each))
        return closure


@pytest.mark.parametrize(("kind", "is_one"), [(Noisy, True), (Lamb, False), (Clipped, False)])
def test_steps_that_draw_random_numbers_are_told_and_leave_the_generator(kind: type[SGD], is_one: bool) -> None:
    optimizer, before = kind([nn.Parameter(torch.ones(3))], lr=0.1), torch.get_rng_state()
    assert draws(optimizer) is is_one
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "is_one"), [(Lamb, True), (FirstGroup, True), (Clipped, False), (AdamW, False), (Adafactor, False)]
)
def test_steps_on_some_parameters_alone_tell_it(kind: type[Optimizer], is_one: bool) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3, 3))]}, {"params": [nn.Parameter(torch.ones(3))]}]
    optimizer: Any = kind(groups, lr=0.1)  # type: ignore[call-arg]
    assert is_coupled(optimizer) is is_one
    if kind is Clipped:
        assert optimizer.counts == [0]
    assert all(float(each.detach().sum()) == each.numel() for group in groups for each in group["params"])


class _NotToBeCopied(nn.Parameter):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise AssertionError(f"copied, after {len(memo)} others")


def test_what_an_optimizer_keeps_of_itself_copies_no_parameters() -> None:
    """Offloaded parameters have no memory to copy then."""
    optimizer: Any = Noisy([_NotToBeCopied(torch.ones(3))], lr=0.1)
    optimizer.hooked = optimizer.zero_grad
    assert draws(optimizer)


class Trusting(Noisy):
    """LARS: by the norm of each parameter's gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad / each.grad.norm())
        return closure


class ByColumns(Noisy):
    """muP: by the number of columns, which flat pieces and columns lack."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad / (each.shape[1] if each.dim() == 2 else 1))
        return closure


@pytest.mark.parametrize("are_flat", [True, False])
@pytest.mark.parametrize(("kind", "is_one"), [(Trusting, False), (ByColumns, False), (AdamW, True)])
def test_steps_on_pieces_tell_whether_every_number_is_treated_by_itself(
    kind: type[Optimizer], is_one: bool, are_flat: bool
) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3, 3))], lr=0.1)  # type: ignore[call-arg]
    assert is_elementwise(optimizer, are_flat=are_flat) is is_one
