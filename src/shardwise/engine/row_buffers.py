"""Find buffers that count the rows of a batch, `self.seen += len(x)`, and those that no mean over replicas puts right.

Replicas have equal values of counted rows, so a comparison at the end of a step shows nothing. But each has counted its
own rows, and one device would have counted all. A queue of the last rows, a largest value and a mean by the rows of a
class differ on replicas, and the mean of theirs (`buffers="mean"`) is not what one device would have. They are found by
four forwards, of two rows and of single ones:

    the same after each of three single rows, and different after two together      counts rows
    after two together not the mean of both alone, which differ                     not the mean of parts
"""

from typing import NamedTuple

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


class RowBuffers(NamedTuple):
    """Buffers that count rows, and those whose values for a batch are not the mean of those for its parts."""

    counters: list[str] = []  # noqa: RUF012 - of a tuple, and never written
    no_means: list[str] = []  # noqa: RUF012


def find_row_buffers(module: nn.Module, example: Batch, seen: Seen, precision: Context) -> RowBuffers:
    """Look at buffers in training mode; none are found if the module cannot compute a single row."""
    three = three_rows(example, seen)
    try:
        both, *each_alone = (
            _left(module, take_rows(three, seen, *each), precision) for each in ((0, 2), (0, 1), (1, 2), (2, 3))
        )
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return RowBuffers()
    counters = [
        name
        for name, value in both.items()
        if all(name in one and not _are_equal(value, one[name]) for one in each_alone)
        and all(_are_equal(each_alone[0][name], one[name]) for one in each_alone)
    ]
    first, second, _ = each_alone
    there = both.keys() & first.keys() & second.keys()
    return RowBuffers(counters, sorted(each for each in there if _is_no_mean(both[each], first[each], second[each])))


def check_row_buffers(found: RowBuffers, num_replicas: int, how: str | None) -> None:
    """Refuse buffers that replicas cannot have alike; `how` is what the user wants of those that differ."""
    if found.counters and how is None:
        raise ShardwiseError(
            f"the forward counts the rows that it is given in the buffer {some(found.counters)}: each of"
            f" {num_replicas} replicas has its own rows, and counts those alone",
            remedy='count batches; or buffers="first", if the rows of one replica are meant',
        )
    if found.no_means:
        raise ShardwiseError(
            f"the forward writes to the buffer {some(found.no_means)}, and {num_replicas} replicas have {num_replicas}"
            " different ones: each has seen its own rows of the batch, and the mean of theirs is not what one device"
            " would have",
            remedy="write it between steps on every rank, by engine.predict(batch), which has all rows; or"
            ' buffers="first", those of the first replica, as DDP broadcasts them',
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


def _is_no_mean(both: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether the value for two rows is far from the mean of those for each, which differ."""
    if both.shape != one.shape or both.shape != other.shape or both.is_meta or both.is_complex():
        return False
    whole, first, second = (each.double() for each in (both, one, other))
    spread = _largest(first - second)
    if not both.is_floating_point():
        return spread > 0
    # What is written may come from numbers that were rounded to 16 bits.
    rounding = (1e-9 if both.dtype is torch.float64 else 1e-2) * max(_largest(first), _largest(second))
    return _largest(whole - (first + second) / 2) > 1e-2 * spread + rounding


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
