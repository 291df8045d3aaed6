"""The origin of non-finite values: the first layer whose output, or the parameter whose gradient, is not finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.torch_private import pytree
from shardwise.training.data.rows import Batch
from shardwise.training.world import World


def explain(engine: Engine, batch: Batch, loss: float, *, step: int, world: World) -> str:
    """Return a sentence that explains a non-finite step. The batch is run again and checked layer by layer.

    Every rank calls this, with the weights from before the step.
    """
    if engine.was_finite:
        return f"at step {step} loss or gradients were not finite, and run again, from the same weights, they are"
    if math.isfinite(loss):
        return _of_gradients(engine, loss, step=step, world=world)
    with _watched(engine.module) as seen:
        engine.evaluate(batch)
    order = {name: place for place, (name, _) in enumerate(engine.module.named_modules())}
    told = [(order[name], name, rank, what) for rank, mine in enumerate(world.gather(seen)) for name, what in mine]
    if not told:
        return f"at step {step} the loss is {loss}, though the output of every layer is finite: look at the loss itself"
    _, name, rank, what = min(told)
    return f"at step {step} the loss is {loss}: the first layer whose output has {what} is {name}, on rank {rank}"


def _of_gradients(engine: Engine, loss: float, *, step: int, world: World) -> str:
    """Explain non-finite gradients. Backward starts at the end, so the last such parameter of the module was first."""
    said = f"at step {step} the loss is {loss:.4f} and the norm of the gradients is {engine.gradient_norm}"
    gradients = engine.gradients()
    wrong = [name for name, _ in engine.module.named_parameters() if name in gradients and _trouble(gradients[name])]
    if not wrong:
        return said
    layer, _, parameter = wrong[-1].rpartition(".")
    holders = world.gather(wrong[-1] in engine.parameters)
    where = f", on rank {holders.index(True)}" if True in holders else ""
    what = _trouble(gradients[wrong[-1]])
    return f"{said}: the first layer whose gradient has {what} is {layer or 'the module'}, in its {parameter}{where}"


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that receives the first layer with a non-finite output for finite inputs."""
    seen: list[tuple[str, str]] = []

    def look(name: str) -> Any:
        def hook(_: nn.Module, given: Any, output: Any) -> None:
            if not seen and _trouble(output) and not _trouble(given):
                seen.append((name, _trouble(output)))

        return hook

    handles = [each.register_forward_hook(look(name)) for name, each in module.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _trouble(values: Any) -> str:
    """Return `NaN` or `infinity` if a tensor in `values` has one, else the empty string."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point()]
    if any(bool(torch.isnan(each).any()) for each in tensors):
        return "NaN"
    return "infinity" if any(bool(torch.isinf(each).any()) for each in tensors) else ""
