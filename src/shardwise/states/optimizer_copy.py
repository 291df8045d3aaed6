"""A copy of an optimizer that has other parameters: to try what its steps do, and to measure its state.

A user's own optimizer may hold more than torch's do: another optimizer (Lookahead, a wrapper), a table, a lock, a log.
Steps of a copy must change none of these. `copy.deepcopy` drops the attributes of optimizers, and fails for locks.

    Lookahead ── inner ──> SGD               copy ── inner ──> copy of SGD
         └─ param_groups ─┘                     └─ param_groups ─┘   the same groups, of the given parameters
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.stages.split.python_state import classes_left_as_they_were
from shardwise.torch_private import drop_step_hooks, pytree

#: Attributes in which torch's optimizers keep parameters.
OWN_ATTRIBUTES = frozenset({"param_groups", "state", "defaults"})


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer holds in its attributes, and those that these hold."""
    found = [optimizer]
    for one in found:  # It grows meanwhile.
        held = {key: value for key, value in vars(one).items() if key not in OWN_ATTRIBUTES}
        inner = [each for each in pytree.tree_leaves(held) if isinstance(each, Optimizer)]
        found += [each for each in dict.fromkeys(inner) if each not in found]
    return found[1:]


def copy_with(optimizer: Optimizer, params: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Return a copy without state and hooks, whose groups have these parameters; groups beyond them have none.

    Its own parameters are not copied: they may be large, or not there while offloaded.
    """
    every = [optimizer, *inner_optimizers(optimizer)]
    memo: dict[int, Any] = {}
    groups = {id(each): each for one in every for each in one.param_groups}
    for one in every:
        memo[id(one)] = object.__new__(type(one))
        memo[id(getattr(one, "state", one))] = memo.get(id(getattr(one, "state", one)), defaultdict(dict))
    memo.update((id(each), each) for group in groups.values() for each in group["params"])
    given = {id(group): list(mine) for group, mine in zip(optimizer.param_groups, params, strict=False)}
    for key, group in groups.items():
        settings = {name: _copied(value, memo) for name, value in group.items() if name != "params"}
        memo[key] = {**settings, "params": given.get(key, [])}
    for one in every:
        memo[id(one.param_groups)] = [memo[id(group)] for group in one.param_groups]
    for one in every:
        # A scheduler puts a `step` of its own in front, which would count.
        settings = {key: _copied(value, memo) for key, value in vars(one).items() if key != "step"}
        vars(memo[id(one)]).update(settings)
        drop_step_hooks(memo[id(one)])
    copied: Optimizer = memo[id(optimizer)]
    return copied


def leaving_no_trace(optimizer: Optimizer) -> AbstractContextManager[None]:
    """While a copy steps: restore at exit what it shares with the optimizer, such as counts of a class or a script."""
    every = [optimizer, *inner_optimizers(optimizer)]
    return classes_left_as_they_were(map(type, every), *every)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; of what cannot be copied (a lock, a file) the thing itself."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return value
    try:
        found = memo[id(value)] = object.__new__(type(value))
        vars(found).update({key: _copied(each, memo) for key, each in vars(value).items()})
    except TypeError:  # Not an object of a class written in Python.
        memo[id(value)] = value
        return value
    return found
