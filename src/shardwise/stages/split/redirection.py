"""Redirect what refers to a module, or to anything in it, to a copy of the module.

`deepcopy` copies functions as they are. A hook or a replaced forward of the copy would call the original's layers:

    block.register_forward_hook(lambda module, given, output, adapter=adapter: output + adapter(output))

References are followed through closures, defaults, globals that a function names, methods, `functools.partial`, weak
references, objects of the user's classes and small containers.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from shardwise.stages.split.drawn_state import names_in
from shardwise.stages.split.names_reached import is_followed, is_full, is_read

#: Containers with more entries than this are not searched.
_MOST = 256


class Redirection:
    """Copies what refers to the module, directly or not; everything else stays what it is."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        #: What is being copied, so that its address is not given to something else meanwhile.
        self._kept: list[Any] = []

    def of(self, held: Any) -> Any:
        if id(held) in self._memo:
            return self._memo[id(held)]
        make = self._maker_of(held)
        if make is None:
            return held
        self._kept.append(held)
        self._memo[id(held)] = held  # It may refer to itself.
        self._memo[id(held)] = made = make(held)
        return made

    def _maker_of(self, held: Any) -> Callable[[Any], Any] | None:
        if isinstance(held, FunctionType):
            return self._function
        if isinstance(held, MethodType):
            return self._method
        if isinstance(held, partial):
            return self._partial
        if isinstance(held, ReferenceType):
            return self._reference
        if isinstance(held, (dict, list, tuple)):
            is_plain = type(held) in (dict, list, tuple) and len(held) <= _MOST
            return self._container if is_plain else None
        is_searched = hasattr(held, "__dict__") and (is_followed(held) or isinstance(held, nn.Module))
        return self._object if is_searched else None

    def _function(self, function: FunctionType) -> FunctionType:
        names = [name for name in names_in(function.__code__) if is_read(function) and name in function.__globals__]
        scope = self._changed({name: function.__globals__[name] for name in names})
        cells = function.__closure__ or ()
        within = [self.of(each.cell_contents) if is_full(each) else None for each in cells]
        are_same = all(not is_full(each) or each.cell_contents is one for each, one in zip(cells, within, strict=True))
        defaults, by_name = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        if not scope and are_same and defaults is function.__defaults__ and by_name is function.__kwdefaults__:
            return function
        closure = tuple(CellType(one) if is_full(each) else each for each, one in zip(cells, within, strict=True))
        globals_ = {**function.__globals__, **scope} if scope else function.__globals__
        made = FunctionType(function.__code__, globals_, function.__name__, defaults, closure or None)
        made.__kwdefaults__ = by_name
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        vars(made).update(vars(function))
        made.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return made

    def _method(self, method: MethodType) -> MethodType:
        owner, function = self.of(method.__self__), self.of(method.__func__)
        is_same = owner is method.__self__ and function is method.__func__
        return method if is_same else MethodType(function, owner)

    def _reference(self, held: "ReferenceType[Any]") -> "ReferenceType[Any]":
        there = held()
        # A copy that is made here would have no other reference.
        return ref(self._memo[id(there)]) if there is not None and id(there) in self._memo else held

    def _partial(self, held: Any) -> Any:
        function, args, kwargs = self.of(held.func), self.of(held.args), self.of(held.keywords)
        is_same = function is held.func and args is held.args and kwargs is held.keywords
        return held if is_same else partial(function, *args, **kwargs)

    def _container(self, held: Any) -> Any:
        if isinstance(held, dict):
            changed = self._changed(held)
            return {**held, **changed} if changed else held
        entries = [self.of(each) for each in held]
        return held if all(a is b for a, b in zip(held, entries, strict=True)) else type(held)(entries)

    def _object(self, held: Any) -> Any:
        changed = self._changed(vars(held))
        if not changed:
            return held
        made = copy(held)
        made.__dict__ = {**vars(held), **changed}
        return made

    def _changed(self, held: Mapping[Any, Any]) -> dict[Any, Any]:
        pairs = {key: self.of(each) for key, each in held.items()}
        return {key: each for key, each in pairs.items() if each is not held[key]}
