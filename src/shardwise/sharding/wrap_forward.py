"""Wrap a module's forward in a function.

The module becomes an instance of a new subclass of its class, made for it alone. So hooks, copies and `isinstance` keep
working, and no module refers to another. Attributes set on the subclass (`type(self).calls += 1`) are set on the
original class, which all of its modules share.
"""

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
    kind: Any = type(own)
    made = _handing_on(kind)
    module.__class__ = made(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
