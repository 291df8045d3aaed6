"""Something done around a module's own forward.

The module becomes an instance of a class of its own, made for it from the one it had: hooks, copies and `isinstance`
go on working, and nothing refers from one module to another.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

#: Is given the module's own forward and its arguments, and returns what the module returns.
Around = Callable[..., Any]


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Put a function around a module's forward."""
    own = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(own.forward, self), *args, **kwargs)

    # Hugging Face and others look at the names of what forward takes.
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
