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

Engines do not: on an H200 it is faster for single large weights, and slower for all weights of Llama-1B.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.choose import FLOATS, takes_kernel
from shardwise.torch_private import FUSED_ADAM, FUSED_ADAMW, fused_adam_by


def fused_adam() -> AbstractContextManager[None]:
    """Return a context in which torch's `Adam` and `AdamW` with `fused=True` step with the kernel, in this thread."""
    return fused_adam_by(adam_, adamw_)


def adamw_(*tensors: Sequence[Tensor], **settings: Any) -> None:
    """Take the step of `torch._fused_adamw_`, with its arguments: weights decay by themselves."""
    _step(FUSED_ADAMW, tensors, settings, decays_gradient=False)


def adam_(*tensors: Sequence[Tensor], **settings: Any) -> None:
    """Take the step of `torch._fused_adam_`, with its arguments: decay is part of the gradient."""
    _step(FUSED_ADAM, tensors, settings, decays_gradient=True)


def _step(definition: Any, tensors: tuple[Sequence[Tensor], ...], settings: dict[str, Any], **how: bool) -> None:
    """`tensors`: weights, gradients, both moments, their largest so far (AMSGrad), and counts of steps."""
    if tensors[0] and _takes(tensors, settings):
        from shardwise.kernels.adamw_triton import launch_adamw

        weights, gradients, first, second, _, steps = tensors
        launch_adamw(list(zip(weights, gradients, first, second, steps, strict=True)), settings, **how)
    else:
        definition(*tensors, **settings)


def _takes(tensors: tuple[Sequence[Tensor], ...], settings: dict[str, Any]) -> bool:
    weights, gradients, first, second, _, steps = tensors
    if settings["amsgrad"] or settings["maximize"] or isinstance(settings["lr"], Tensor):
        return False
    dtype, device = weights[0].dtype, weights[0].device
    moved = (*weights, *gradients, *first, *second)
    return (
        dtype in FLOATS
        and all(each.dtype is dtype and each.device == device and each.is_contiguous() for each in moved)
        and all(each.dtype is torch.float32 and each.device == device for each in steps)
        and takes_kernel("adamw", weights[0].detach())
    )
