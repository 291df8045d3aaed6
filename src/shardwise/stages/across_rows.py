"""Find where rows of a batch interact: the first module whose result for a row changes without the other rows."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.rows import changed, nodes
from shardwise.stages.stage import Batch

#: What `first_across` returns if rows interact in no module.
THE_LOSS = "the loss"


def first_across(module: nn.Module, run: Callable[[Batch], Any], three: Batch, one: Batch, tolerance: float) -> str:
    """Return its name and class, from a run of three rows and one of the last row; `THE_LOSS` if there is none."""
    whole, part = (_seen(module, run, each) for each in (three, one))
    for (name, found), (other, alone) in zip(whole, part, strict=False):
        if name == other and found.dim() and alone.dim() and found.shape[0] == 3 * alone.shape[0]:
            mine = found[-alone.shape[0] :]
            if mine.shape == alone.shape and not _is_close(mine, alone, tolerance):
                where = dict(module.named_modules())[name]
                return f"{name} ({type(where).__name__})" if name else type(where).__name__
    return THE_LOSS


def with_numbers_of(whole: Any, part: Any) -> Any:
    """Return an output of some rows with the scalars that were returned for all rows: a balancing loss, for example."""
    numbers = {path: each for path, each in nodes({"": whole}) if isinstance(each, Tensor) and not each.dim()}
    return changed({"": part}, lambda path, _: numbers.get(path))[""]


def _seen(module: nn.Module, run: Callable[[Batch], Any], batch: Batch) -> list[tuple[str, Tensor]]:
    """Record in order the inputs of modules, under the name of their parent, and their outputs, under their own."""
    made: list[tuple[str, Tensor]] = []

    def note(name: str, value: Any) -> None:
        if type(value) is Tensor and value.is_floating_point():
            made.append((name, value.detach().clone()))

    with ExitStack() as hooks:
        for name, each in module.named_modules():
            above = name.rpartition(".")[0]
            before = each.register_forward_pre_hook(lambda _, args, name=above: note(name, args[0] if args else None))
            after = each.register_forward_hook(lambda _, __, returned, name=name: note(name, returned))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        run(batch)
    return made


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not other.numel():  # An expert that no token came to.
        return True
    return bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max())))
