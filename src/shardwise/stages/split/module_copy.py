"""Copy a module with some of its tensors replaced."""

import copy
from collections import OrderedDict
from functools import cache
from types import FunctionType
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.redirection import Redirection

_AS_THEY_ARE = (int, float, bool, str, type(None))


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module with the tensors in `memo` replaced, also in what its functions refer to."""
    for each in module.modules():
        for held in vars(each).values():
            # `weight_norm` leaves a non-leaf tensor as an attribute, which `deepcopy` rejects.
            if isinstance(held, Tensor) and not held.is_leaf:
                memo.setdefault(id(held), held.detach().to("meta"))
    _copy_plain(module, memo)
    twin = copy.deepcopy(module, memo)
    redirection = Redirection(dict(memo))
    for each in twin.modules():
        attributes = vars(each)
        for key, held in attributes.items():
            if isinstance(held, (FunctionType, ReferenceType)):
                attributes[key] = redirection.of(held)
            elif isinstance(held, OrderedDict) and held and key.endswith("_hooks"):
                held.update({handle: redirection.of(hook) for handle, hook in held.items()})
    return twin


def _copy_plain(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy into `memo` every submodule that can be copied attribute by attribute, and leave the others to `deepcopy`.

    `deepcopy` would do the same, but spends half of its time on each module's dozen empty dictionaries for hooks.
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
        # All modules are in `memo` now, so references to them become references to their copies.
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
    """Whether a class is copied by `deepcopy`'s default and has all of its attributes in its dictionary."""
    alike = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__")
    return (
        not hasattr(kind, "__deepcopy__")
        and all(getattr(kind, name) is getattr(nn.Module, name) for name in alike)
        and not any(vars(each).get("__slots__") for each in kind.__mro__)
    )
