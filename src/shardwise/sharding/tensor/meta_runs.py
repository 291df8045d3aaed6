"""Runs of cut copies on the meta device: on which ranks, and which module was running when one raised."""

import traceback
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from shardwise.sharding.block_watch import BlockWatch
from shardwise.sharding.tensor.linear import ParallelLinear
from shardwise.sharding.tensor.regions import Found
from shardwise.stages.split.meta import Guesses


def is_crossed(found: Found, block: str) -> bool:
    """Whether a region is only partly in a block: then operations between its layers are outside the block, too."""
    for region in found.regions:
        inside = [name == block or name.startswith(f"{block}.") for name in (*region.columns, *region.rows)]
        if block in (*region.columns, *region.rows) or (any(inside) and not all(inside)):
            return True
    return False


def different_ranks(found: Found, num_ranks: int) -> list[int]:
    """Return one rank of each kind: ranks with equally many channels in every layer are alike."""
    kinds: dict[Hashable, int] = {}
    for rank in range(num_ranks):
        sizes = tuple(
            sum(stop - start for start, stop in runs[rank])
            for region in found.regions
            for runs in (*region.columns.values(), *region.rows.values())
        )
        kinds.setdefault(sizes, rank)
    return list(kinds.values())


def run_on_meta(module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], watch: BlockWatch) -> Any:
    """Run a module on the meta device. Nothing is sent."""
    args, kwargs = arguments
    with torch.no_grad(), Guesses(), watch:
        return module(*args, **kwargs)


def find_holder(twin: nn.Module, error: Exception) -> str | None:
    """Return the innermost module with cut layers that was running when an error was raised; None if none was."""
    names: dict[nn.Module, str] = {each: name for name, each in twin.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and any(isinstance(each, ParallelLinear) for each in running.children()):
            return names.get(running)
    return None
