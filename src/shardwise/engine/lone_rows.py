"""Batch norms that a plan leaves too few rows: torch's error, with the keys of the plan that have cut the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import TracebackType

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.states.batch_norm import is_batch_norm

#: What torch says in training of one row, or of one value of each channel.
_TOO_FEW = "Expected more than 1 value per channel"


@contextmanager
def norms_explained(module: nn.Module, plan: Plan, num_rows: int) -> Iterator[None]:
    """Name the keys of a plan that have left a batch norm too few values. `num_rows`: those of a microbatch."""
    try:
        yield
    except ValueError as error:
        cuts = {key: size for key in ("dp", "microbatches", "cp") if (size := getattr(plan, key)) > 1}
        if _TOO_FEW not in str(error) or not cuts:
            raise
        raise ShardwiseError(
            f"{_norm_of(module, error.__traceback__)} has one value for each channel: with"
            f" {' and '.join(f'{key}={size}' for key, size in cuts.items())} a forward has"
            f" {num_rows} row{'s' if num_rows > 1 else ''} of the batch, and a batch norm in training needs more",
            remedy="batches that are larger (drop_last=True in the loader, if the last one is not); or"
            f" {', '.join(f'{key}={size // 2}' for key, size in cuts.items())}",
        ) from error


def _norm_of(module: nn.Module, trace: TracebackType | None) -> str:
    """The batch norm that raised, by its name and class."""
    called = {id(frame.f_locals.get("self")) for frame, _ in walk_tb(trace)}
    norms = [(name, each) for name, each in module.named_modules() if is_batch_norm(each)]
    found = [f"{name} ({type(each).__name__})" for name, each in norms if id(each) in called]
    return found[0] if found else "a batch norm"
