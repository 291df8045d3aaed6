"""A copy of a module, with other tensors in the place of some."""

import copy
import inspect
from collections import OrderedDict
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any, cast
from weakref import ReferenceType, ref

from torch import Tensor, nn

from shardwise.errors import ShardwiseError

_AS_THEY_ARE = (int, float, bool, str, type(None))


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module, with other tensors in the place of those in `memo`; so is what its functions refer to."""
    for each in module.modules():
        for held in vars(each).values():
            # What weight_norm leaves behind is a result, and nothing that can be copied.
            if isinstance(held, Tensor) and not held.is_leaf:
                memo.setdefault(id(held), held.detach().to("meta"))
    _copy_plain(module, memo)
    twin = copy.deepcopy(module, memo)
    for each in twin.modules():
        attributes = vars(each)
        for key, held in attributes.items():
            if isinstance(held, (FunctionType, ReferenceType)):
                attributes[key] = _within(held, memo)
            elif isinstance(held, OrderedDict) and held and key.endswith("_hooks"):
                held.update({handle: _within(hook, memo) for handle, hook in held.items()})
    return twin


def _copy_plain(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy, into `memo`, every module below this one that is copied attribute by attribute; all others are left.

    `deepcopy` would do the same, but half of its time goes into the dozen empty dictionaries for hooks that each has.
    """
    shells: list[tuple[nn.Module, nn.Module]] = []
    left = [module]
    while left:
        each = left.pop()
        kind: Any = type(each)
        if id(each) not in memo and _is_plain(kind):
            memo[id(each)] = shell = kind.__new__(kind)
            shells.append((each, shell))
            left += each.children()
    for each, shell in shells:
        # All modules are known to `memo` now, so that what refers to one gets its copy.
        state: dict[str, Any] = each.__getstate__()  # type: ignore[no-untyped-call]
        made = {key: _copy_of(key, held, each, memo) for key, held in state.items()}
        shell.__setstate__(made)  # type: ignore[no-untyped-call]


def _copy_of(key: str, held: Any, module: nn.Module, memo: dict[int, Any]) -> Any:
    try:
        return _copy(held, memo)
    except TypeError as error:
        raise ShardwiseError(
            f"{key} of {type(module).__name__} is a {type(held).__name__} that cannot be copied ({error}), and the"
            " module is tried on a copy",
            remedy="make it in the first forward; in the place of an iterator, a list and a number that says where it"
            " is",
        ) from error


def _copy(held: Any, memo: dict[int, Any]) -> Any:
    kind = type(held)
    if kind in _AS_THEY_ARE:
        return held
    if kind in (dict, OrderedDict) and not held:
        return memo.setdefault(id(held), kind())
    return copy.deepcopy(held, memo)


@cache
def _is_plain(kind: Any) -> bool:
    """Whether a class leaves it to `deepcopy` how it is copied, and all that it has is in its dictionary."""
    alike = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__")
    return (
        not hasattr(kind, "__deepcopy__")
        and all(getattr(kind, name) is getattr(nn.Module, name) for name in alike)
        and not any(vars(each).get("__slots__") for each in kind.__mro__)
    )


def _within(held: Any, memo: dict[int, Any]) -> Any:
    """What refers to a module that was copied, or to its tensors, as `deepcopy` leaves it: of the copy.

    So does, as a rule, a forward that a user put in the place of another, a hook, and a reference to the parent.
    """
    if isinstance(held, MethodType) and id(held.__self__) in memo:
        return MethodType(held.__func__, memo[id(held.__self__)])
    if isinstance(held, ReferenceType):
        return ref(memo[id(held())]) if id(held()) in memo and held() is not None else held
    if isinstance(held, FunctionType):
        return _with_cells(held, memo)
    return memo.get(id(held), held) if isinstance(held, (nn.Module, Tensor)) else held


def _with_cells(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The same function over what its cells have of the copy."""
    if not function.__closure__ or id(function) in memo:
        return cast(FunctionType, memo.get(id(function), function))
    memo[id(function)] = function  # It may hold itself.
    try:
        contents = [cell.cell_contents for cell in function.__closure__]
    except ValueError:
        return function  # One of them is not set yet.
    within = [_within(each, memo) for each in contents]
    if all(one is other for one, other in zip(contents, within, strict=True)):
        return function
    cells = tuple(CellType(each) for each in within)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    made.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    memo[id(function)] = made
    return made
