"""The state of a module under its own names, of which a process may hold a part."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, unknown


def held_state(
    module: nn.Module, held: Iterable[Tensor], homes: Mapping[nn.Parameter, Tensor] | None = None
) -> dict[str, Any]:
    """The entries of the module's state whose tensors are held here: a tied parameter under each of its names.

    What is no tensor, a module's extra state, is everybody's. `homes` has the numbers of those that are not there now.
    """
    here, away = {id(each) for each in held}, homes or {}
    whole: dict[str, Any] = module.state_dict(keep_vars=True)
    return {
        name: away.get(each, each).detach() if isinstance(each, Tensor) else each  # type: ignore[call-overload]
        for name, each in whole.items()
        if not isinstance(each, Tensor) or id(each) in here
    }


def joined(module: nn.Module, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state in the module's order, from the parts of all processes."""
    found: dict[str, Any] = {}
    for part in parts:
        found.update(part)
    return {name: found[name] for name in module.state_dict()}


@torch.no_grad()
def load_held_state(
    module: nn.Module,
    held: Iterable[Tensor],
    state: Mapping[str, Any],
    homes: Mapping[nn.Parameter, Tensor] | None = None,
) -> None:
    """Take what is held here from a state, whole or a part. Nothing is changed if something is missing or misshapen."""
    whole: dict[str, Any] = module.state_dict(keep_vars=True)
    values, away = values_for(module, held, state, lambda name: whole[name].shape), homes or {}
    for name in [name for name in values if isinstance(whole[name], nn.Parameter) and whole[name] in away]:
        away[whole[name]].copy_(values.pop(name))
    module.load_state_dict(values, strict=False)


def values_for(
    module: nn.Module, held: Iterable[Tensor], state: Mapping[str, Any], shape_of: Callable[[str], torch.Size]
) -> dict[str, Any]:
    """The values of what is held here, by all names that the module has for it; of a tied parameter one will do.

    Refuses a state that lacks some, has others than the module, or has one of another shape than it is to have.
    """
    whole: dict[str, Any] = module.state_dict(keep_vars=True)
    for name in state:
        if name not in whole:
            raise unknown("entry of a state", name, whole)
    mine = held_state(module, held)
    thing = {name: id(whole[name]) if isinstance(whole[name], Tensor) else name for name in mine}
    given = {thing[name]: state[name] for name in reversed(mine) if name in state}
    missing = [name for name in mine if thing[name] not in given]
    if missing:
        raise ShardwiseError(
            f"the state lacks {missing[0]}, one of {len(missing)} missing of the {len(mine)} entries that are held"
            " here",
            remedy="engine.state_dict() of all ranks, or state_dict(sharded=True) of this one under the same plan",
        )
    values = {name: given[thing[name]] for name in mine}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape != shape_of(name):
            raise ShardwiseError(
                f"{name} has shape {tuple(value.shape)} in the state and {tuple(shape_of(name))} in the module",
                remedy="the state of a module with the same shapes",
            )
    return values
