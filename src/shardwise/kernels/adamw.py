"""Adam and AdamW in one pass over weights, gradients and moments: what torch's fused ones do, for all of their tensors.

    g ──┬── m = b1 m + (1 - b1) g       ── stored
        └── v = b2 v + (1 - b2) g g     ── stored
                └── w (1 - lr decay) - lr m / (1 - b1^t) / (sqrt v / sqrt(1 - b2^t) + eps)

Numbers are computed in float32, whatever their dtype, and rounded once. Torch's kernel computes with the settings in
float64, so that every number is converted to it and back: 35 ms where reading and writing takes 18 (5.4 billion weights
in bf16, H200).

The definition is torch's function. `adamw_` takes the same arguments, so an optimizer of torch's can call it instead,
with all of its hooks, its state, and its count of steps:

    with kernels.fused_adam():
        optimizer.step()

Engines do so for weights in 16 bits. In float32 the kernel is 6 % faster than torch's, whose bits are those of its
function for the host: with the state of some weights there, training is the same bit for bit.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.choose import FLOATS, takes_kernel
from shardwise.torch_private import FUSED_ADAM, FUSED_ADAMW, fused_adam_by


def fused_adam(dtypes: Collection[torch.dtype] = FLOATS) -> AbstractContextManager[None]:
    """Return a context in which torch's `Adam` and `AdamW` with `fused=True` step with the kernel, in this thread:
    weights of these dtypes."""
    return fused_adam_by(partial(adam_, dtypes=dtypes), partial(adamw_, dtypes=dtypes))


def adamw_(*tensors: Sequence[Tensor], dtypes: Collection[torch.dtype] = FLOATS, **settings: Any) -> None:
    """Take the step of `torch._fused_adamw_`, with its arguments: weights decay by themselves."""
    _step(FUSED_ADAMW, dtypes, tensors, settings, decays_gradient=False)


def adam_(*tensors: Sequence[Tensor], dtypes: Collection[torch.dtype] = FLOATS, **settings: Any) -> None:
    """Take the step of `torch._fused_adam_`, with its arguments: decay is part of the gradient."""
    _step(FUSED_ADAM, dtypes, tensors, settings, decays_gradient=True)


def _step(
    definition: Any, dtypes: Collection[torch.dtype], tensors: tuple[Sequence[Tensor], ...], settings: dict[str, Any],
    **how: bool,
) -> None:  # fmt: skip
    """`tensors`: weights, gradients, both moments, their largest so far (AMSGrad), and counts of steps."""
    if tensors[0] and tensors[0][0].dtype in dtypes and _takes(tensors, settings):
        from shardwise.kernels.adamw_triton import launch_adamw

        weights, gradients, first, second, _, steps = tensors
        launch_adamw(list(zip(weights, gradients, first, second, steps, strict=True)), settings, **how)
    else:
        definition(*tensors, **settings)


def _takes(tensors: tuple[Sequence[Tensor], ...], settings: dict[str, Any]) -> bool:
    """Whether the kernel can do it. A graph in capture would keep a place of the host's memory, where a table was."""
    weights, gradients, first, second, _, steps = tensors
    if settings["amsgrad"] or settings["maximize"] or isinstance(settings["lr"], Tensor):
        return False
    if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    dtype, device = weights[0].dtype, weights[0].device
    moved = (*weights, *gradients, *first, *second)
    return (
        dtype in FLOATS
        and all(each.dtype is dtype and each.device == device and each.is_contiguous() for each in moved)
        and all(each.dtype is torch.float32 and each.device == device for each in steps)
        and takes_kernel("adamw", weights[0].detach())
    )
