"""What each unit of a module asks of its place: bytes for its weights and all that training adds, and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.split.arguments import Signature
from shardwise.runtime.split.choose import Wishes, costs_of
from shardwise.runtime.split.flow import Flow
from shardwise.runtime.split.units import find_units
from shardwise.runtime.stage import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One call of a unit. A weight that several units share is in each of them, and counts once on a place."""

    unit: str
    #: FLOPs or their like: only how they compare counts.
    cost: float
    #: Bytes of each parameter and buffer by its first name, with its gradient and what an optimizer keeps of it.
    states: Mapping[str, int]
    #: Bytes of activations: what one microbatch's forward leaves for its backward, or hands on.
    kept_bytes: int


def state_bytes(module: nn.Module, *, moments: int) -> dict[str, int]:
    """Bytes of each parameter and buffer. In training a parameter has a gradient and `moments` more of its size."""
    sizes = {name: _size(each) for name, each in module.named_buffers()}
    for name, each in module.named_parameters():
        sizes[name] = _size(each) * (2 + moments if trains(module) and each.requires_grad else 1)
    return sizes


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode and has anything to train."""
    return module.training and any(each.requires_grad for each in module.parameters())


def loads_without_example(module: nn.Module, *, moments: int) -> list[Load]:
    """The units in the order of the module, each as costly as its weights are large. Activations are not known."""
    sizes, first_names = state_bytes(module, moments=moments), _first_names(module)
    return [
        Load(
            unit=name,
            cost=float(sum(_size(each) for each in unit.parameters())),
            states={key: sizes[key] for key in _names_in(unit, first_names)},
            kept_bytes=0,
        )
        for name, unit in find_units(module).items()
    ]


def loads_of(
    module: nn.Module, units: Mapping[str, nn.Module], flow: Flow, example: Batch, *, moments: int
) -> list[Load]:
    """The calls of units on the example, with what was measured there."""
    sizes, first_names = state_bytes(module, moments=moments), _first_names(module)
    nothing = Wishes(num_stages=1, cut=None, costs=None, speeds=None, limit_bytes=None)
    kept = _kept_bytes(module, units, example) if trains(module) else _returned_bytes(flow)
    return [
        Load(
            unit=call.unit,
            cost=cost,
            states={key: sizes[key] for key in {*_names_in(units[call.unit], first_names), *call.touched}},
            kept_bytes=kept[number],
        )
        for number, (call, cost) in enumerate(zip(flow.calls, costs_of(flow, nothing), strict=True))
    ]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_names(module: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in [*module.named_parameters(), *module.named_buffers()]}


def _names_in(unit: nn.Module, first_names: Mapping[int, str]) -> list[str]:
    return [first_names[id(each)] for each in [*unit.parameters(), *unit.buffers()]]


def _returned_bytes(flow: Flow) -> list[int]:
    return [
        sum(prod(each.shape) * each.dtype.itemsize for each in call.outline.tensors.values()) for call in flow.calls
    ]


def _kept_bytes(module: nn.Module, units: Mapping[str, nn.Module], example: Batch) -> list[int]:
    """What autograd would keep for each call of a unit, in order; what glue keeps is the last unit's."""
    seen = {each.untyped_storage().data_ptr() for each in [*module.parameters(), *module.buffers()]}
    kept: list[int] = []
    args, kwargs = Signature(module).arguments(example)

    def begin(*_: Any) -> None:
        kept.append(0)

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if kept and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(tensor)
            kept[-1] += storage.nbytes()

    # A storage that is gone would leave its address to another, which would not be counted then.
    alive: list[Tensor] = []
    hooks = [unit.register_forward_pre_hook(begin) for unit in units.values()]
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, _unpacked):
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in before:
            buffer.data.copy_(value)
    return kept


def _unpacked(_: None) -> Tensor:
    raise AssertionError("the run that counts activations has no backward")


def total_bytes(loads: Sequence[Load], num_in_flight: int) -> int:
    """What these units need together, with so many microbatches between their forward and their backward."""
    states = {name: size for load in loads for name, size in load.states.items()}
    return sum(states.values()) + num_in_flight * sum(load.kept_bytes for load in loads)
