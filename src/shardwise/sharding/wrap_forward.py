"""Wrap a module's forward in a function.

The module becomes an instance of a new subclass of its class, made for it alone. So hooks, copies and `isinstance` keep
working, and no module refers to another. Attributes set on the subclass (`type(self).calls += 1`) are set on the
original class, which all of its modules share. A copy has the wrapped forward; a pickle names the original class, as
pickles find classes by their names.
"""

import copy
import copyreg
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import nn

#: Takes the module's own forward and its arguments, and returns the module's output.
Around = Callable[..., Any]


@cache
def _handing_on(kind: Any) -> Any:
    """Return a subclass of a metaclass whose classes forward attribute assignments to their base class."""

    def set_there(made: Any, key: str, value: Any) -> None:
        if key.startswith(("__", "_abc_")) or callable(value):  # Belongs to the subclass itself: another forward, say.
            type.__setattr__(made, key, value)
        else:
            setattr(made.__base__, key, value)

    return type(kind.__name__, (kind,), {"__setattr__": set_there})


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Wrap a module's forward in `around`."""
    own = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(own.forward, self), *args, **kwargs)

    # Hugging Face and others inspect the parameter names of forward.
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        found: Any = own.__reduce_ex__(self, protocol)
        # Of a class that was wrapped before it is the original already, and a user's own way of pickling stays.
        return (object.__new__, (own,), *found[2:]) if _is_of_its_class(found) else found

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": own.__module__, "__copy__": _copied}
    if not hasattr(own, "__deepcopy__"):
        members["__deepcopy__"] = _deeply_copied
    kind: Any = type(own)
    made = _handing_on(kind)
    module.__class__ = made(own.__name__, (own,), members)


def _is_of_its_class(reduced: Any) -> bool:
    """Whether what pickles store of an object is its class and its state."""
    return isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]


def _copied(module: Any) -> Any:
    twin: Any = object.__new__(type(module))
    twin.__setstate__(module.__getstate__())
    return twin


def _deeply_copied(module: Any, memo: dict[int, Any]) -> Any:
    twin: Any = object.__new__(type(module))
    memo[id(module)] = twin
    twin.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return twin
