"""An optimizer that steps on some of what it has, or on stand-ins in place of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer


class Substitute(NamedTuple):
    """What an optimizer steps on in place of a weight, or of some rows of it; and its state, if it has one yet."""

    weight: nn.Parameter
    stand_in: nn.Parameter
    state: Mapping[str, Any]


def step_on(optimizer: Optimizer, substitutes: Sequence[Substitute]) -> list[dict[str, Any]]:
    """Step on substitutes, each as its weight would be, and return their states."""
    stand_ins: dict[nn.Parameter, list[nn.Parameter]] = {}
    for weight, stand_in, state in substitutes:
        stand_ins.setdefault(weight, []).append(stand_in)
        if state:
            optimizer.state[stand_in] = dict(state)
    groups = [[one for each in group["params"] for one in stand_ins.get(each, ())] for group in optimizer.param_groups]
    with only(optimizer, groups):
        optimizer.step()
    return [optimizer.state.pop(each.stand_in, {}) for each in substitutes]


@contextmanager
def only(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """An optimizer that has these alone, by group."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, mine in zip(optimizer.param_groups, params, strict=True):
            group["params"] = mine
        yield
    finally:
        for group, mine in zip(optimizer.param_groups, before, strict=True):
            group["params"] = mine


def weights_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """What an optimizer has, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def set_rate(optimizer: Optimizer, rate: float | None) -> None:
    """Have an optimizer use a learning rate, if one is given."""
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def is_many(value: Any) -> bool:
    """Whether an entry of a state has numbers of a weight. Counts of steps are one number, and may be anywhere."""
    return isinstance(value, Tensor) and value.dim() > 0
