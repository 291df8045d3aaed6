"""Choose between a kernel and its definition:

a CPU, a meta device, a subclass of Tensor         the definition; in Triton's interpreter a CPU has kernels too, and
                                                   in a rehearsal the meta device (`launch.py`)
an active dispatch mode that records operators     the definition: the mode sees operators that it knows
torch.compile is tracing                           as `WHEN_COMPILED` says
an unsupported dtype or size                       the definition, with one warning, once
a Triton that cannot compile                       the definition, with one warning, once
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from shardwise import environment
from shardwise.kernels.launch import is_rehearsed
from shardwise.torch_private import is_compiled_function, is_watched

#: Dtypes that kernels support.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: Kernels that are kept under torch.compile. The others are cheap, and the compiler fuses their definitions with the
#: operations before and after them, which it could not do with a kernel.
WHEN_COMPILED = frozenset({"cross_entropy", "linear_cross_entropy"})


def autocast_type(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype of matmuls on a device; None without autocast."""
    # Torch has no autocast state for the meta device.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def takes_kernel(name: str, *tensors: Tensor | None, lacks: Callable[[], str | None] | None = None) -> bool:
    """Whether the kernel of this name supports these tensors.

    `lacks` returns in a few words what the kernel does not support about them, if anything.
    """
    given = [each for each in tensors if each is not None]
    first = given[0]
    if not (first.is_cuda or is_rehearsed(first) or (first.device.type == "cpu" and is_interpreted())):
        return False
    if torch.compiler.is_compiling():
        if name not in WHEN_COMPILED:
            return False
    elif is_watched() or any(type(each) not in (Tensor, nn.Parameter) for each in given):
        return False
    elif first.is_cuda and first.device.index != torch.cuda.current_device():
        return False  # Triton launches on the current device, not on that of the tensors.
    problem = _problem(given) or (lacks() if lacks is not None else None)
    if problem is not None:
        if not torch.compiler.is_compiling():
            say_once(f"the kernel of {name} has no {problem}: its definition runs in its place")
        return False
    return not first.is_cuda or torch.compiler.is_compiling() or compiles(first.device)


def _problem(tensors: list[Tensor]) -> str | None:
    first = tensors[0]
    floats = [each for each in tensors if each.is_floating_point()]
    unknown = [each.dtype for each in floats if each.dtype not in FLOATS]
    if unknown:
        return f"{unknown[0]} (bfloat16, float16 and float32 it has)"
    if any(each.device != first.device for each in tensors):
        return f"tensors on several devices ({', '.join(str(each.device) for each in tensors)})"
    return None


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU: `TRITON_INTERPRET=1`, for tests."""
    return environment.find_variable("TRITON_INTERPRET") == "1"


def settle(module: nn.Module, loss: Callable[..., object] | None, *, kernels: bool = True) -> None:
    """Prepare a module of ours for training with this loss (None: unknown). Without `kernels`, it uses definitions.

    Modules with kernels have an attribute `kernels`, and a head whose logits may wait for the loss has `waits`. Lazy
    logits do not work with a compiled loss, so then the head computes all of them.
    """
    for each in module.modules():
        if isinstance(each.__dict__.get("kernels"), bool):
            each.__dict__["kernels"] = kernels
        if isinstance(each.__dict__.get("waits"), bool):
            each.__dict__["waits"] = kernels and loss is not None and not is_compiled_function(loss)


@cache
def say_once(line: str) -> None:
    warnings.warn(line, stacklevel=4)


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton can compile for this GPU: compile and run one kernel."""
    try:
        from shardwise.kernels.scale_triton import scale_by

        number = torch.ones(1, device=device)
        scale_by(number, number + 1, number)
        torch.cuda.synchronize(device)
    except Exception as error:  # Triton, its compiler or the driver may raise anything: go on without kernels.
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        say_once(f"Triton cannot compile kernels for {device} ({reason}): their definitions run in their place")
        return False
    return True
