"""Something done around a module's own forward.

The module becomes an instance of a class of its own, made for it from the one it had: hooks, copies and `isinstance`
go on working, and nothing refers from one module to another. What is set on that class (`type(self).calls += 1`) is
set on the one it was made from, which all modules of it share.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import nn

#: Is given the module's own forward and its arguments, and returns what the module returns.
Around = Callable[..., Any]


@cache
def _handing_on(kind: Any) -> Any:
    """A class of classes like this one, that sets what is set on its base."""

    def set_there(made: Any, key: str, value: Any) -> None:
        if key.startswith(("__", "_abc_")) or callable(value):  # Of the class itself, as another forward is.
            type.__setattr__(made, key, value)
        else:
            setattr(made.__base__, key, value)

    return type(kind.__name__, (kind,), {"__setattr__": set_there})


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Put a function around a module's forward."""
    own = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(own.forward, self), *args, **kwargs)

    # Hugging Face and others look at the names of what forward takes.
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    kind: Any = type(own)
    made = _handing_on(kind)
    module.__class__ = made(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
