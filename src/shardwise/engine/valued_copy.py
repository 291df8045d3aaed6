"""A copy of a module for trials, in which values are those that a script has set in the module.

Attributes of modules are set in the copy one by one. Objects that a module or a hook holds (a configuration, a list of
terms) are copied with it, so before a trial the copy of each gets the values of the original again.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from shardwise.stages.split.meta import meta_twin
from shardwise.stages.split.script_values import followed_in
from shardwise.stages.split.set_values import Holder, Number, Record, is_value
from shardwise.stages.split.theirs import is_own
from shardwise.torch_private import buffer_slots, every_hook_of

#: Buffers with more elements than this are not kept for trials: their modules initialize them anew.
_MOST_IN_BUFFERS = 2**16


class Absent:
    """The value of an attribute that was not set on the object; its class may have had it."""

    def __repr__(self) -> str:
        return "not there"


ABSENT = Absent()


class WasSet(NamedTuple):
    """A value that was set: its holder, its key, the old and the new value."""

    holder: int
    key: str
    was: Any
    now: Any


class ValuedCopy:
    """A copy of a module on the meta device, for trials; values are set in it as in the module."""

    def __init__(self, module: nn.Module, holders: Sequence[Holder], kept: Sequence[Mapping[str, Any]]) -> None:
        self.module, self._holders = meta_twin(module), holders
        self._pairs = list(_pairs_of(module, self.module))
        self._buffers = {
            name: each.clone() for name, each in module.named_buffers() if each.numel() <= _MOST_IN_BUFFERS
        }
        #: Tensors of one element in modules, also buffers: a meta copy does not know their values.
        self._numbers = {
            f"{each.module}.{key}".strip("."): value
            for each, values in zip(holders, kept, strict=True)
            for key, value in values.items()
            if each.module is not None and isinstance(value, Number)
        }

    def again(self) -> nn.Module:
        """Return another meta copy, with the values of buffers and of objects as they were or were set since."""
        for one, other in self._pairs:
            _set_alike(one, other)
        twin = meta_twin(self.module)
        for name, buffer in self._buffers.items():
            owner, _, key = name.rpartition(".")
            kept = self._numbers.get(name)
            buffer_slots(twin.get_submodule(owner))[key] = (buffer if kept is None else kept.was).clone()
        return twin

    def outline(self) -> nn.Module:
        """Return a meta copy for its shapes alone."""
        return meta_twin(self.module)

    def set(self, found: Sequence[WasSet]) -> None:
        """Set those that are attributes of modules."""
        for each in found:
            path = self._holders[each.holder].module
            if path is None:
                continue
            module = self.module.get_submodule(path)
            if each.now is ABSENT:
                vars(module).pop(each.key, None)
            elif isinstance(each.now, nn.Module):
                setattr(module, each.key, deepcopy(each.now))
            elif isinstance(each.now, Number):
                self._numbers[f"{path}.{each.key}".strip(".")] = each.now
            else:
                vars(module)[each.key] = each.now.owner if isinstance(each.now, Record) else each.now


def _pairs_of(module: nn.Module, twin: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the objects that modules and hooks hold, each with its copy, if there is another one."""
    seen: set[int] = set()
    for name, each in module.named_modules():
        copy = twin.get_submodule(name)
        held = [(one, vars(copy).get(key)) for key, one in followed_in(each)]
        hooks = zip(every_hook_of(each), every_hook_of(copy), strict=True)
        held += [(_owner(one), _owner(other)) for one, other in hooks]
        for one, other in held:
            yield from _pairs_in(one, other, seen)


def _owner(hook: Any) -> Any:
    return hook.__self__ if isinstance(hook, MethodType) else hook


def _pairs_in(one: Any, other: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if type(one) is not type(other) or one is other or id(one) in seen or isinstance(one, (nn.Module, type)):
        return
    seen.add(id(one))
    if not isinstance(one, (dict, list, set)):
        one, other = (getattr(each, "__dict__", {}) for each in (one, other))
    yield one, other
    inside = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
    for key, each in inside:
        there = other.get(key) if isinstance(one, dict) else other[key]
        if isinstance(each, (dict, list, set)) or is_own(type(each)):
            yield from _pairs_in(each, there, seen)


def _set_alike(one: Any, other: Any) -> None:
    """Give a copy the plain values, functions and configurations of the original."""
    if isinstance(one, dict):
        other.update({key: each for key, each in one.items() if _is_copied(each)})
    elif isinstance(one, list):
        # What is no value stays its copy: a layer, a tensor.
        other[:] = [each if _is_copied(each) or key >= len(other) else other[key] for key, each in enumerate(one)]
    else:
        other.clear()
        other.update(one)


def _is_copied(value: Any) -> bool:
    return is_value(value) and not isinstance(value, (nn.Module, MethodType))
