"""A copy of a module is what `deepcopy` would make, with other tensors in the place of some."""

import copy
import sys
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from shardwise.stages.split.module_copy import _is_plain, copied
from shardwise.torch_private import forward_hooks


class Part(nn.Module):
    def __init__(self, parent: nn.Module, seen: dict[str, int]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen, self.settings = seen, {"deep": [1, 2]}
        vars(self)["parent"] = parent


class Owner(nn.Module):
    """Parts that know their parent and share a dictionary, a tied weight, a buffer that is not saved, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        first, second = Part(self, self.seen), Part(self, self.seen)
        second.linear.weight = first.linear.weight
        self.parts = nn.ModuleList([first, second])
        self.register_buffer("steps", torch.zeros(2), persistent=False)
        self.parts[0].register_forward_hook(print)


class Alone(nn.Module):
    """A module that says itself how it is copied."""

    def __init__(self, times: int = 0) -> None:
        super().__init__()
        self.times, self.linear = times, nn.Linear(2, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Alone":
        return Alone(self.times + 1)


def test_what_was_shared_is_shared_and_nothing_is_the_originals() -> None:
    owner: Any = Owner().eval()
    twin: Any = copied(owner, {})
    other = copy.deepcopy(owner)
    first, second = twin.parts
    assert first.parent is twin
    assert first.seen is second.seen is twin.seen is not owner.seen
    assert first.settings == {"deep": [1, 2]}
    assert first.settings["deep"] is not owner.parts[0].settings["deep"]
    assert first.linear.weight is second.linear.weight is not owner.parts[0].linear.weight
    assert twin.state_dict().keys() == owner.state_dict().keys()
    assert list(first._forward_hooks.values()) == [print]
    assert not twin.training
    assert vars(twin).keys() == vars(other).keys()
    twin.parts[0].register_forward_hook(print)
    assert len(owner.parts[0]._forward_hooks) == 1


def test_tensors_that_are_given_take_the_place_of_others() -> None:
    owner: Any = Owner()
    weight = nn.Parameter(torch.ones(3, 3))
    memo: dict[int, Any] = {id(owner.parts[0].linear.weight): weight}
    twin: Any = copied(owner, memo)
    assert twin.parts[0].linear.weight is twin.parts[1].linear.weight is weight
    assert twin.steps is not owner.steps


def test_a_module_that_says_how_it_is_copied_is_asked() -> None:
    kinds: list[Any] = [nn.Linear, Alone]
    assert [_is_plain(each) for each in kinds] == [True, False]
    twin: Any = copied(nn.Sequential(Alone(), nn.ReLU()), {})
    assert twin[0].times == 1


def test_functions_hooks_and_references_are_of_the_copy() -> None:
    """`deepcopy` leaves them as they are: a copy that was tried read the weights of the original."""
    owner = Owner()
    part: Any = owner.parts[0]
    part.ask, part.above = lambda: owner.steps, ref(owner)
    part.register_forward_hook(lambda *_: owner.get_parameter("parts.1.linear.weight"))
    twin = copied(owner, {})
    other: Any = twin.get_submodule("parts.0")
    assert other.ask() is twin.get_buffer("steps")
    assert other.above() is twin
    assert list(forward_hooks(other))[1][0]() is twin.get_parameter("parts.1.linear.weight")
    assert part.ask() is owner.steps
    assert part.above() is owner


@pytest.mark.parametrize("kind", ["a default", "a keyword's default", "bound beforehand", "in a list", "of a global"])
def test_however_a_hook_refers_to_a_layer_it_calls_the_copys(kind: str) -> None:
    """Adapters that are put in by hooks: their gradients were those of the original, and no trial saw them."""
    owner: Any = Owner()
    layers: list[Any] = [owner.parts[1].linear]
    vars(sys.modules[__name__])["HELD"] = owner

    hooks: dict[str, Any] = {
        "a default": lambda *_, layer=layers[0]: layer.weight,
        "a keyword's default": _weight_of(layers[0]),
        "bound beforehand": partial(lambda layer, *_: layer.weight, layers[0]),
        "in a list": lambda *_: layers[0].weight,
        "of a global": _weight_of_a_global,
    }
    owner.parts[0].register_forward_hook(hooks[kind])
    twin = copied(owner, {})
    hook = list(forward_hooks(twin.get_submodule("parts.0")))[1][0]
    assert hook() is twin.get_parameter("parts.1.linear.weight")
    assert list(forward_hooks(owner.parts[0]))[1][0]() is layers[0].weight


def _weight_of(layer: nn.Linear) -> Any:
    def hook(*_: Any, which: nn.Linear = layer) -> torch.Tensor:
        return which.weight

    return hook


HELD: Any = None


def _weight_of_a_global(*_: Any) -> torch.Tensor:
    weight: torch.Tensor = HELD.parts[1].linear.weight
    return weight
