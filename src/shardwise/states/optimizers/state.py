"""The state of optimizers by parameter names, in a form that does not depend on the plan.

    {"state": {"layers.0.up.weight": {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}, ...},
     "param_groups": [{"params": ["layers.0.up.weight", ...], "lr": 3e-4, "betas": (0.9, 0.95), ...}, ...]}

It is the form of `torch.distributed.checkpoint.state_dict`. Groups with equal settings are merged: settings are looked
up by the name of a parameter, not by the index of its group.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, unknown

#: By parameter, then by the optimizer's own key.
States = Mapping[str, Mapping[str, Any]]
#: The name of the parameter that each weight of an optimizer is, or is a piece of.
Names = Mapping[Tensor, str]


def groups_of(optimizers: Iterable[Optimizer], names: Names) -> list[dict[str, Any]]:
    """Return the settings, each with the parameters that have them."""
    return [
        {"params": list(dict.fromkeys(named)), **_settings(group)}
        for _, group, named in _named_groups(optimizers, names)
    ]


def joined_states(parts: Iterable[Mapping[str, Any]], order: Iterable[str]) -> dict[str, Any]:
    """Join the states of several processes, in the order of the module's parameters."""
    found: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for part in parts:
        found.update(part["state"])
        for group in part["param_groups"]:
            alike = next((each for each in groups if _are_alike(each, group)), None)
            if alike is None:
                groups.append({**group, "params": list(group["params"])})
            else:
                alike["params"] = list(dict.fromkeys([*alike["params"], *group["params"]]))
    places = {name: place for place, name in enumerate(order)}
    for group in groups:
        group["params"].sort(key=places.__getitem__)
    groups.sort(key=lambda group: places[group["params"][0]])
    return {"state": {name: found[name] for name in places if name in found}, "param_groups": groups}


def check_states(state: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse what is no state of optimizers, or is one of another module."""
    lacking = [key for key in ("state", "param_groups") if key not in state]
    if lacking:
        raise ShardwiseError(
            f"the optimizers' state has no {lacking[0]!r}; it has {', '.join(map(str, state)) or 'nothing'}",
            remedy="what engine.optimizer_state_dict() gave",
        )
    names = set(known)
    grouped = (name for group in state["param_groups"] for name in group["params"])
    for name in (*state["state"], *grouped):
        if name not in names:
            raise unknown("parameter of an optimizers' state", name, sorted(names))


def load_settings(optimizers: Iterable[Optimizer], names: Names, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the settings of its parameters. Nothing is changed if one of them has none."""
    saved = {name: group for group in groups for name in group["params"]}
    changes = []
    for optimizer, group, named in _named_groups(optimizers, names):
        for name in named:
            if name not in saved:
                raise ShardwiseError(
                    f"no group of the optimizers' state has {name}", remedy="a state of the same trained parameters"
                )
        settings = _settings(saved[named[0]])
        # Keys added later, such as a scheduler's initial rate, are not settings of the optimizer itself.
        if optimizer.defaults.keys() - settings.keys():
            own = sorted(optimizer.defaults.keys() - settings.keys())
            theirs = sorted(settings.keys() - optimizer.defaults.keys())
            raise ShardwiseError(
                f"the optimizers' state is not of {type(optimizer).__name__}: of {named[0]} it has "
                f"{', '.join(theirs) or 'fewer settings'}, and not {', '.join(own) or 'others'}",
                remedy=f"a state that {type(optimizer).__name__} has saved",
            )
        changes.append((group, settings))
    for group, settings in changes:
        group.update(settings)


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are not tensors."""
    return {key: each for key, each in _settings(group).items() if not isinstance(each, Tensor)}


def check_shapes(states: States, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse entries that are of parameters of other shapes."""
    for name, shape in shapes.items():
        for key, value in states.get(name, {}).items():
            if isinstance(value, Tensor) and value.dim() == len(shape) and _differs(value.shape, shape):
                raise ShardwiseError(
                    f"{key} of {name} has shape {tuple(value.shape)} in the optimizers' state, and the parameter"
                    f" {tuple(shape)}",
                    remedy="the state of a module with the same shapes",
                )


def taken(state: Mapping[str, Any], weight: Tensor, optimizer: Optimizer, home: torch.device) -> dict[str, Any]:
    """Copy a state for an optimizer, to where it lives; a count of steps to where the optimizer keeps it."""
    counts_there = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim():
            return value.to(home, copy=True)
        return value.to(weight.device if counts_there else "cpu", copy=True)

    return {key: copied(each) for key, each in state.items()}


def on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state to the CPU, to be sent to other processes."""
    return {key: each.detach().cpu() if isinstance(each, Tensor) else each for key, each in state.items()}


def is_of_each_number(value: Any, weight: Tensor) -> bool:
    """Whether an entry has a number for each of a weight's: only those lie where the weight lies."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == weight.shape


def _named_groups(
    optimizers: Iterable[Optimizer], names: Names
) -> Iterator[tuple[Optimizer, dict[str, Any], list[str]]]:
    """Yield every group that has a named parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            named = [names[weight] for weight in group["params"] if weight in names]
            if named:
                yield optimizer, group, named


def _differs(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a shape is neither all of a whole nor, as a factor of it is, one number along some of its dims."""
    return any(size not in (1, most) for size, most in zip(shape, whole, strict=True))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in group.items() if key not in ("params", "param_names")}


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    mine, theirs = _settings(one), _settings(other)
    return mine.keys() == theirs.keys() and all(bool(mine[key] == theirs[key]) for key in mine)
