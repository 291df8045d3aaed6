"""Find buffers that count the rows of a batch: `self.seen += len(x)`.

Replicas have equal values of them, so a comparison at the end of a step shows nothing. But each has counted its own
rows, and one device would have counted all. They are found by four forwards: a buffer that is the same after each of
three single rows, and different after two of them together, counts rows.
"""

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, some
from shardwise.stages.rows import Seen, take_rows
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.switch import undisturbed
from shardwise.stages.stage import Batch
from shardwise.stages.steady_draws import steady
from shardwise.stages.trial_rows import three_rows
from shardwise.stages.trial_run import Context
from shardwise.states.shared_buffers import own_buffers
from shardwise.torch_private import RunningNormModule


def find_row_counters(module: nn.Module, example: Batch, seen: Seen, precision: Context) -> list[str]:
    """Return the buffers that count rows in training mode; none if the module cannot compute a single row."""
    three = three_rows(example, seen)
    try:
        both, *each_alone = (
            _left(module, take_rows(three, seen, *each), precision) for each in ((0, 2), (0, 1), (1, 2), (2, 3))
        )
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return []
    return [
        name
        for name, value in both.items()
        if all(name in one and not _are_equal(value, one[name]) for one in each_alone)
        and all(_are_equal(each_alone[0][name], one[name]) for one in each_alone)
    ]


def check_row_counters(found: list[str], num_parts: int) -> None:
    if found:
        raise ShardwiseError(
            f"the forward counts the rows that it is given in the buffer {some(found)}: each of {num_parts} replicas"
            " has its own rows, and counts those alone",
            remedy='count batches; or buffers="first", if the rows of one replica are meant',
        )


def _left(module: nn.Module, batch: Batch, precision: Context) -> dict[str, Tensor]:
    """Return the buffers that a forward in training mode has written; the module is restored."""
    norms = [each for each in module.modules() if isinstance(each, RunningNormModule) and each.training]
    for each in norms:
        each.training = False
    try:
        with undisturbed(module, {}), precision(), steady():
            args, kwargs = Signature(module).arguments(batch)
            module(*args, **kwargs)
            return {name: each.detach().clone() for _, _, name, each in own_buffers(module)}
    finally:
        for each in norms:
            each.training = True


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-6, equal_nan=True)
