"""Whether this machine has memory for a check, counted before any rank is started."""

from collections.abc import Sequence
from itertools import chain

from torch import nn

from shardwise.cluster.local import available_bytes
from shardwise.engine.module_check import check_module
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpu, find_gpus
from shardwise.units import counted, format_bytes

_REMEDY = "--steps 1, or a module of the same kind with fewer or narrower layers: what a plan does to it is the same"
#: Copies of the weights in one device's training: weights, gradients, the two moments of AdamW.
_TRAINED = 4
#: Copies kept of each step for the comparison: gradients, the weights that were used, and those after it.
_KEPT = 3


def check_given(module: nn.Module, plan: Plan, *, num_steps: int, device: str) -> None:
    """Refuse a module that cannot be trained as plain torch does, or that a check on this machine has no room for."""
    check_module(module)
    check_memory(module, plan, num_steps=num_steps, gpus=find_gpus().gpus if device == "cuda" else ())


def check_memory(
    module: nn.Module,
    plan: Plan,
    *,
    num_steps: int,
    gpus: Sequence[Gpu] = (),
    available: int | None = None,
) -> None:
    """Refuse a module that a check of `num_steps` steps has no room for, on GPUs where some are given.

    What is counted is there for certain, so nothing is refused that fits: the training on one device, what is kept of
    its steps, and the module once for each rank, which makes it whole before it is shared out (of one on the meta
    device each makes its own part, so it is there once). 0 steps are compared where nothing is.
    """
    tensors = {id(each): each for each in chain(module.parameters(), module.buffers())}.values()
    weights = sum(each.numel() * each.element_size() for each in tensors)
    here = sum(each.numel() * each.element_size() for each in tensors if each.device.type == "cpu")
    kept, made = _KEPT * num_steps, plan.num_ranks if here else 1
    alone = (0 if gpus else _TRAINED) + kept if num_steps else 1
    # While ranks train, the module of the one device is still there, with its gradients.
    together = made + ((0 if gpus else 2) + kept if num_steps else 1)
    name = f"{type(module).__name__} under {plan}"
    needed = max(alone, together) * weights - here
    room = available_bytes() if available is None else available
    if needed > room:
        compared = f" and {counted(num_steps, 'step')} that are compared" if num_steps else ""
        raise ShardwiseError(
            f"{name} needs {format_bytes(needed)} more of this machine's memory, for {format_bytes(weights)} of"
            f" weights, {counted(plan.num_ranks, 'rank')}{compared};"
            f" {format_bytes(room)} are available ({format_bytes(needed - room)} short)",
            remedy=_REMEDY,
        )
    if gpus:
        sharing = -(-plan.num_ranks // len(gpus))
        on_each = sharing if here else 0
        on_gpu = max(_TRAINED, 2 + on_each) if num_steps else on_each
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        if on_gpu * weights > smallest.memory_bytes:
            raise ShardwiseError(
                f"{name} needs {format_bytes(on_gpu * weights)} on a GPU, for {format_bytes(weights)} of weights and"
                f" {counted(sharing, 'rank')} there; {smallest.name} has {format_bytes(smallest.memory_bytes)}"
                f" ({format_bytes(on_gpu * weights - smallest.memory_bytes)} short)",
                remedy=_REMEDY,
            )
