"""What each unit of a module asks of its place: bytes for its weights and all that training adds, and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.activation_bytes import Kept
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.choose import SplitOptions, choose, costs_of
from shardwise.stages.split.flow import UnitFlow
from shardwise.stages.split.parts import inseparable_calls
from shardwise.stages.split.units import find_units
from shardwise.stages.stage import Batch
from shardwise.states.tiers.activation_offload import LEAST_BYTES


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
    #: Of these, pieces that are too small to go to the host.
    small_bytes: int = 0
    #: What it is given by the unit before it: where a stage begins with it, that stays on the device.
    given_bytes: int = 0


def state_bytes(module: nn.Module, *, moments: int) -> dict[str, int]:
    """Bytes of each parameter and buffer. In training a parameter has a gradient and `moments` more of its size."""
    sizes = {name: _size(each) for name, each in module.named_buffers()}
    for name, each in module.named_parameters():
        sizes[name] = _size(each) * (2 + moments if trains(module) and each.requires_grad else 1)
    return sizes


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode and has anything to train."""
    return module.training and any(each.requires_grad for each in module.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoads:
    """Everything that a module asks of its places: units, their calls in order, and calls between which is no cut."""

    units: Mapping[str, nn.Module]
    calls: list[Load]
    inseparable: list[tuple[int, int]]
    #: Whether costs are those of a batch, and activations counted.
    are_measured: bool

    def by_unit(self, module: nn.Module, *, moments: int) -> list[Load]:
        """One load for each unit, however often it is called; at the end those that are never called."""
        found: dict[str, Load] = {}
        for load in self.calls:
            known = found.get(load.unit)
            found[load.unit] = load if known is None else _sum_of(known, load)
        sizes, first_names = state_bytes(module, moments=moments), _first_names(module)
        for name, unit in self.units.items():
            states = {key: sizes[key] for key in _names_in(unit, first_names)}
            found.setdefault(name, Load(unit=name, cost=0.0, states=states, kept_bytes=0))
        return list(found.values())


def find_loads(module: nn.Module, example: Batch | None, *, moments: int) -> ModuleLoads:
    """What the module asks for, measured on an example if there is one."""
    if example is None:
        calls = loads_without_example(module, moments=moments)
        return ModuleLoads(units=find_units(module), calls=calls, inseparable=[], are_measured=False)
    units, flow, _ = choose(module, example, SplitOptions(num_stages=1))
    return ModuleLoads(
        units=units,
        calls=loads_of(module, units, flow, example, moments=moments),
        inseparable=inseparable_calls(flow),
        are_measured=True,
    )


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
    module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, example: Batch, *, moments: int
) -> list[Load]:
    """The calls of units on the example, with what was measured there."""
    sizes, first_names = state_bytes(module, moments=moments), _first_names(module)
    nothing = SplitOptions(num_stages=1)
    returned = _returned_bytes(flow)
    kept = _kept_bytes(module, units, example) if trains(module) else [_Kept(each) for each in returned]
    return [
        Load(
            unit=call.unit,
            cost=cost,
            states={key: sizes[key] for key in {*_names_in(units[call.unit], first_names), *call.touched}},
            kept_bytes=kept[number].num_bytes,
            small_bytes=kept[number].small_bytes,
            given_bytes=returned[number - 1] if number else 0,
        )
        for number, (call, cost) in enumerate(zip(flow.calls, costs_of(flow, nothing), strict=True))
    ]


def _sum_of(one: Load, other: Load) -> Load:
    return replace(
        one,
        cost=one.cost + other.cost,
        states={**one.states, **other.states},
        kept_bytes=one.kept_bytes + other.kept_bytes,
        small_bytes=one.small_bytes + other.small_bytes,
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_names(module: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in [*module.named_parameters(), *module.named_buffers()]}


def _names_in(unit: nn.Module, first_names: Mapping[int, str]) -> list[str]:
    return [first_names[id(each)] for each in [*unit.parameters(), *unit.buffers()]]


def _returned_bytes(flow: UnitFlow) -> list[int]:
    return [
        sum(prod(each.shape) * each.dtype.itemsize for each in call.outline.tensors.values()) for call in flow.calls
    ]


@dataclass(slots=True)
class _Kept:
    """What autograd keeps of one call, and how much of it is in small pieces."""

    num_bytes: int = 0
    small_bytes: int = 0


def _kept_bytes(module: nn.Module, units: Mapping[str, nn.Module], example: Batch) -> list[_Kept]:
    """What autograd would keep for each call of a unit, in order; what glue keeps is the last unit's.

    It is counted and let go: there may be no room for all of it.
    """
    every = Kept([*module.parameters(), *module.buffers()])
    kept: list[_Kept] = []
    args, kwargs = Signature(module).arguments(example)

    def begin(*_: Any) -> None:
        kept.append(_Kept())

    def count(tensor: Tensor) -> None:
        size = every.new_bytes(tensor) if kept else 0
        if kept:
            kept[-1].num_bytes += size
            kept[-1].small_bytes += size if size < LEAST_BYTES else 0

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
