"""Replacing the forward of one module instance, and restoring it.

The module becomes an instance of a subclass of its own class: hooks, parameters, names, `isinstance` and `repr` stay.
`computes_as` of the subclass is the module's own class. Modules of one class with equal replacements share the
subclass, so that a compiler treats them as one kind. A copy is replaced too; a pickle has the original module. If other
code has changed the class again meanwhile (tensor parallelism, dropout), that class stays, and restoring only turns the
replacement off.
"""

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from torch import nn

from shardwise.torch_private import hooks_of

#: The attribute of a replaced module that says whether the replacement is on.
_ON = "_with_kernels"


class Forward(Protocol):
    """The replacement of a forward. Equal replacements compute the same."""

    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def __hash__(self) -> int: ...


def why_not(module: nn.Module) -> str | None:
    """Return why a module's forward must not be replaced: other code has changed what its call does."""
    if "forward" in vars(module):
        return "its forward was replaced by somebody else"
    hooked = [name or "it" for name, each in module.named_modules() if hooks_of(each)]
    return f"{hooked[0]} has hooks" if hooked else None


def is_replaced(module: nn.Module) -> bool:
    return _ON in vars(module)


def is_on(module: nn.Module) -> bool:
    return vars(module).get(_ON) is True


def switch(module: nn.Module, *, on: bool) -> None:
    """Turn the replacements in a module on or off."""
    for each in module.modules():
        if is_replaced(each):
            vars(each)[_ON] = on


def replace(module: nn.Module, forward: Forward, **attributes: Any) -> Callable[[], None]:
    """Run `forward` instead of a module's own. `attributes` appear on it as if its class had them. Return a function
    that undoes this."""
    own: Any = type(module)
    made = _class_for(own, forward, tuple(attributes.items()))
    module.__class__ = made
    vars(module)[_ON] = True

    def undo() -> None:
        if type(module) is made:
            module.__class__ = own
            vars(module).pop(_ON, None)
        elif is_replaced(module):
            vars(module)[_ON] = False

    return undo


@cache
def _class_for(own: type[nn.Module], forward: Forward, attributes: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    own_forward = own.forward

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__[_ON]:
            return own_forward(self, *args, **kwargs)
        return forward(self, own_forward, *args, **kwargs)

    # Hugging Face and others read the parameter names of forward.
    run.__signature__ = inspect.signature(own_forward)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        found: Any = own.__reduce_ex__(self, protocol)
        if type(self) is not made:
            return found
        _, _, state, *others = found
        plain = {key: each for key, each in state.items() if key != _ON} if isinstance(state, dict) else state
        # The pickle names the original class, so that loading it does not require this library.
        return (object.__new__, (own,), plain, *others)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        twin: Any = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    members = {"forward": run, "__reduce_ex__": reduce, "__module__": own.__module__, "computes_as": own}
    members |= dict(attributes)
    if not hasattr(own, "__deepcopy__"):
        members["__deepcopy__"] = deepcopy
    made = type(own.__name__, (own,), members)
    return made
