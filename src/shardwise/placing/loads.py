"""The load of each unit of a module on its place: bytes for weights and all that training adds, and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, some
from shardwise.stages.activation_bytes import Kept
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.choose import SplitOptions, choose, costs_of
from shardwise.stages.split.parts import inseparable_calls
from shardwise.stages.split.switch import undisturbed
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.split.units import find_units
from shardwise.stages.stage import Batch
from shardwise.states.tiers.activation_offload import LEAST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One call of a unit. A weight that several units share is in each of them, and counts once on a place."""

    unit: str
    #: FLOPs or a similar measure: only ratios matter.
    cost: float
    #: Bytes of each parameter and buffer by its first name, with its gradient and optimizer state.
    states: Mapping[str, int]
    #: Bytes of activations: what one microbatch's forward saves for its backward, or passes on.
    kept_bytes: int
    #: Of these, pieces that are too small to go to the host.
    small_bytes: int = 0
    #: Bytes of its inputs from the unit before it: if a stage begins with it, they stay on the device.
    given_bytes: int = 0


def state_bytes(module: nn.Module, *, moments: int) -> dict[str, int]:
    """Return the bytes of each parameter and buffer. In training a parameter has a gradient and `moments` more."""
    sizes = {name: each.nbytes for name, each in module.named_buffers()}
    for name, each in module.named_parameters():
        sizes[name] = each.nbytes * (2 + moments if trains(module) and each.requires_grad else 1)
    return sizes


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode and has anything to train."""
    return module.training and any(each.requires_grad for each in module.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoads:
    """All needs of a module: units, their calls in order, and calls that must not be separated."""

    units: Mapping[str, nn.Module]
    calls: list[Load]
    inseparable: list[tuple[int, int]]
    #: Whether costs are those of a batch, and activations counted.
    are_measured: bool

    def by_unit(self, module: nn.Module, *, moments: int) -> list[Load]:
        """Return one load for each unit, however often it is called; units that are never called come last."""
        found: dict[str, Load] = {}
        for load in self.calls:
            known = found.get(load.unit)
            found[load.unit] = load if known is None else _sum_of(known, load)
        for name, states in _states_of(module, self.units, moments=moments).items():
            found.setdefault(name, Load(unit=name, cost=0.0, states=states, kept_bytes=0))
        return list(found.values())


def find_loads(module: nn.Module, example: Batch | None, *, moments: int) -> ModuleLoads:
    """Return the load of the module, measured on an example if there is one."""
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
    """Return the units in the module's order, with costs by the size of their weights. Activations are unknown."""
    units = find_units(module)
    return [
        Load(unit=name, cost=float(sum(each.nbytes for each in units[name].parameters())), states=states, kept_bytes=0)
        for name, states in _states_of(module, units, moments=moments).items()
    ]


def loads_of(
    module: nn.Module,
    units: Mapping[str, nn.Module],
    flow: UnitFlow,
    example: Batch,
    *,
    moments: int,
    is_one_of_many: bool = False,
) -> list[Load]:
    """Return the calls of units on the example, with measurements. The example may be one of many microbatches."""
    sizes, states = state_bytes(module, moments=moments), _states_of(module, units, moments=moments)
    returned = [
        sum(prod(each.shape) * each.dtype.itemsize for each in call.outline.tensors.values()) for call in flow.calls
    ]
    kept = _kept_bytes(module, units, example, is_one_of_many) if trains(module) else [[each] for each in returned]
    costs = costs_of(flow, SplitOptions(num_stages=1))
    return [
        Load(
            unit=call.unit,
            cost=costs[number],
            states=states[call.unit] | {name: sizes[name] for name in call.touched},
            kept_bytes=sum(kept[number]),
            small_bytes=sum(size for size in kept[number] if size < LEAST_BYTES),
            given_bytes=returned[number - 1] if number else 0,
        )
        for number, call in enumerate(flow.calls)
    ]


def _sum_of(one: Load, other: Load) -> Load:
    return replace(
        one,
        cost=one.cost + other.cost,
        states={**one.states, **other.states},
        kept_bytes=one.kept_bytes + other.kept_bytes,
        small_bytes=one.small_bytes + other.small_bytes,
    )


def _states_of(module: nn.Module, units: Mapping[str, nn.Module], *, moments: int) -> dict[str, dict[str, int]]:
    """Return the bytes of the parameters and buffers of each unit, by their first names in the module."""
    sizes = state_bytes(module, moments=moments)
    first_names = {id(each): name for name, each in [*module.named_parameters(), *module.named_buffers()]}
    mine = {name: [first_names[id(each)] for each in (*u.parameters(), *u.buffers())] for name, u in units.items()}
    return {unit: {name: sizes[name] for name in names} for unit, names in mine.items()}


def _kept_bytes(
    module: nn.Module, units: Mapping[str, nn.Module], example: Batch, is_one_of_many: bool
) -> list[list[int]]:
    """Return the bytes that autograd would save for each call of a unit, in order; those of glue go to the last unit.

    It is counted and let go: there may be no room for all of it.
    """
    every = Kept([*module.parameters(), *module.buffers()])
    kept: list[list[int]] = []
    args, kwargs = Signature(module).arguments(example)

    def begin(*_: Any) -> None:
        kept.append([])

    def count(tensor: Tensor) -> None:
        if kept:
            kept[-1].append(every.new_bytes(tensor))

    hooks = [unit.register_forward_pre_hook(begin) for unit in units.values()]
    saving = torch.autograd.graph.saved_tensors_hooks(count, _unpacked)
    try:
        with undisturbed(module, {}) as switch, torch.enable_grad(), saving:
            module(*args, **kwargs)
            if is_one_of_many and switch.noted is not None:
                _refuse_results(switch.noted.state.results())
    finally:
        for hook in hooks:
            hook.remove()
    return kept


def _refuse_results(names: Sequence[str]) -> None:
    """Tensors in attributes that require a gradient: code that reads them gets those of one microbatch."""
    if names:
        raise ShardwiseError(
            f"the forward leaves tensors with a gradient in {some(names)}: with several microbatches that is of one of"
            " them alone, and its gradient would not arrive",
            remedy="return it from the module; or microbatches=1",
        )


def _unpacked(_: None) -> Tensor:
    raise AssertionError("the run that counts activations has no backward")


def total_bytes(loads: Sequence[Load], num_in_flight: int) -> int:
    """Return the total need of these units, with this many microbatches between their forward and backward."""
    states = {name: size for load in loads for name, size in load.states.items()}
    return sum(states.values()) + num_in_flight * sum(load.kept_bytes for load in loads)
