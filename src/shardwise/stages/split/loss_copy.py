"""Redirect a loss to a copy of the module: it may read the module by itself, and not only what it is given.

    def loss(output, batch):
        return cross_entropy(output, batch["labels"]) + model.router.balance

A trial runs a copy. What the copy's forward has left is in the copy, so that is what the loss has to read there.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from shardwise.stages.split.drawn_state import names_in
from shardwise.stages.split.names_reached import is_followed, is_full, is_read
from shardwise.stages.stage import Loss

#: Containers with more entries than this are not searched.
_MOST = 256


def loss_of_copy(loss: Loss, module: nn.Module, twin: nn.Module) -> Loss:
    """Return the loss with its references to a module, and to all in it, redirected to a copy of that module.

    It is the loss itself if it has no such references: in closures, globals, objects whose method it is, and in
    functions, objects and small containers that those refer to.
    """
    memo = {id(each): other for each, other in _pairs(module, twin)}
    made: Loss = _Redirection(memo).of(loss)
    return made


def _pairs(module: nn.Module, twin: nn.Module) -> Iterator[tuple[Any, Any]]:
    for kind in ("named_modules", "named_parameters", "named_buffers"):
        others = dict(getattr(twin, kind)(remove_duplicate=False))
        for name, each in getattr(module, kind)(remove_duplicate=False):
            if name in others:
                yield each, others[name]


class _Redirection:
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
        defaults = tuple(self.of(each) for each in function.__defaults__ or ())
        if not scope and are_same and all(a is b for a, b in zip(defaults, function.__defaults__ or (), strict=True)):
            return function
        closure = tuple(CellType(one) if is_full(each) else each for each, one in zip(cells, within, strict=True))
        globals_ = {**function.__globals__, **scope} if scope else function.__globals__
        made = FunctionType(function.__code__, globals_, function.__name__, defaults or None, closure or None)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        vars(made).update(vars(function))
        return made

    def _method(self, method: MethodType) -> MethodType:
        owner, function = self.of(method.__self__), self.of(method.__func__)
        is_same = owner is method.__self__ and function is method.__func__
        return method if is_same else MethodType(function, owner)

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
