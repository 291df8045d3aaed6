"""Detect at the next step that a script has compiled layers, or what calls them, after the engine was made; or has
replaced the forward of what calls them.

    model.forward = torch.compile(model.forward)        model.trunk.compile()        model.trunk = torch.compile(...)
    model.forward = types.MethodType(another, model)

Code that was compiled around layers reads their weights by itself (`compiled_check.py`), and `layer.compile()` takes
the place of what brings the weights of that layer. Inside of a layer both are no problem. What a forward hands from
layer to layer was tried on the example, where it matters which rank computes them.
"""

from typing import Any

from torch import nn

from shardwise.engine.compiled_check import axes_that_bring_weights
from shardwise.engine.parts import Parts
from shardwise.errors import ShardwiseError
from shardwise.torch_private import get_compiled_call, is_compiled, is_compiled_function, submodules

#: The axes for which a forward is tried on the example: what its layers are given, or may be given a part of.
_CUT = ("pp", "tp", "cp", "ep")


class UnchangedCalls:
    """How units, and the modules around them, were called when the engine was made."""

    def __init__(self, parts: Parts) -> None:
        self._axes = axes_that_bring_weights(parts.plan)
        self._cut = [f"{axis}={getattr(parts.plan, axis)}" for axis in _CUT if getattr(parts.plan, axis) > 1]
        units = {unit.partition("#")[0] for each in parts.split.units for unit in each} if self._axes else set()
        named = dict(parts.module.named_modules())
        around = {name for name in named if any(not name or unit.startswith(f"{name}.") for unit in units)}
        #: Of each its name, what stands in the place of its call and of its forward, and its submodules.
        self._kept: list[tuple[str, nn.Module, Any, Any, dict[str, Any]]] = [
            (name, each, get_compiled_call(each), _forward_of(each), dict(submodules(each)) if name in around else {})
            for name, each in named.items()
            if name in units or name in around
        ]

    def check(self) -> None:
        """Refuse what was compiled since, and another forward around layers."""
        for name, module, call, forward, below in self._kept:
            children = submodules(module)
            others = [key for key, each in below.items() if children.get(key) is not each]
            later = [key for key in others if _is_compiled(children.get(key))]
            if later:
                raise self._late(f"{name}.{later[0]}" if name else later[0])
            now = _forward_of(module)
            if get_compiled_call(module) is not call or (below and now is not forward and is_compiled_function(now)):
                raise self._late(name or type(module).__name__)
            if below and now is not forward and self._cut:
                raise ShardwiseError(
                    f"the forward of {name or type(module).__name__} was replaced once the engine was there, and what"
                    f" {', '.join(self._cut)} cut was found by the one that it had",
                    remedy="replace it before sw.parallelize",
                )

    def _late(self, name: str) -> ShardwiseError:
        return ShardwiseError(
            f"{name} was compiled by torch.compile once the engine was there: the compiled code would read weights by"
            f" itself, and under {self._axes} these come when a layer is called",
            remedy="parallelize(..., compile=True); or layer.compile() of each layer before sw.parallelize",
        )


def _forward_of(module: nn.Module) -> Any:
    return vars(module).get("forward")


def _is_compiled(child: nn.Module | None) -> bool:
    return child is not None and is_compiled(child)
