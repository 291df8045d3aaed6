"""Hooks of parameters that do not keep an engine, and with it its parameters, in memory.

Python's garbage collector does not look into `register_post_accumulate_grad_hook`: what such a hook refers to lives as
long as its parameter, and a hook that refers to its parameter lives for ever. An engine that was dropped without being
closed would keep its weights, gradients and optimizer state.
"""

from collections.abc import Callable
from weakref import WeakMethod

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def when_accumulated(parameter: Tensor, call: Callable[..., None], *numbers: int) -> RemovableHandle:
    """Call a method of an object, as long as there is one, when the gradient of this parameter has been added to.

    The method is given the numbers and the parameter."""
    weak = WeakMethod(call)

    def accumulated(parameter: Tensor) -> None:
        found = weak()
        if found is not None:
            found(*numbers, parameter)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    return handle
