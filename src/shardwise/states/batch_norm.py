"""Running statistics of batch norms with several copies, each of which sees a part of the microbatches.

Replicas are copies, and so are the two copies of the model in some schedules. Each copy normalises by its own
microbatch. The statistics for evaluation are those of one device that processes all microbatches in turn.

After k microbatches with momentum m, a running mean is r(k) = (1-m)^k r(0) + the contribution of these microbatches. So
the contribution of another copy follows from its r(k), and can be added as if its microbatches had come after ours:
(1-m)^k r + (r' - (1-m)^k r(0)). Without momentum, all microbatches weigh the same, and it is the mean over all.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from shardwise.torch_private import RunningNormModule

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
#: Returns the objects of all ranks, in their order.
Gather = Callable[[Any], list[Any]]


def is_batch_norm(module: nn.Module) -> TypeGuard[RunningNormModule]:
    """Return whether it has statistics of batches. Instance norms count no batches: theirs are ordinary buffers."""
    return isinstance(module, RunningNormModule) and not isinstance(module, _INSTANCE_NORMS)


class _Seen(NamedTuple):
    """The statistics of one batch norm, and their number of microbatches."""

    number: int
    values: tuple[Tensor, ...]


class SharedStatistics:
    """The batch norms of this rank that have copies on other ranks."""

    def __init__(self, module: nn.Module, buffers: Collection[str], gather: Gather) -> None:
        self._gather = gather
        self._norms = {
            name: each
            for name, each in module.named_modules()
            if is_batch_norm(each) and each.track_running_stats and f"{name}.running_mean" in buffers
        }
        #: Whether any rank has such norms: then all ranks gather.
        self.are_there = any(gather(bool(self._norms)))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Wrap a step: at its end, every copy has the statistics of all microbatches."""
        before = {name: _seen(each) for name, each in self._norms.items()}
        yield
        told = self._gather({name: _seen(each) for name, each in self._norms.items()})
        for name, norm in self._norms.items():
            copies = [part[name] for part in told if name in part]
            if len(copies) > 1:
                _set(norm, _joined(norm.momentum, before[name], copies))


def _seen(norm: RunningNormModule) -> _Seen:
    assert norm.running_mean is not None, "it tracks its statistics"
    assert norm.running_var is not None, "it tracks its statistics"
    assert norm.num_batches_tracked is not None, "it tracks its statistics"
    return _Seen(int(norm.num_batches_tracked), (norm.running_mean.clone(), norm.running_var.clone()))


def _joined(momentum: float | None, before: _Seen, copies: list[_Seen]) -> _Seen:
    """Return the statistics of one batch norm after the microbatches of all copies, copy by copy."""
    now = before
    for copy in copies:
        added = copy.number - before.number
        if momentum is None:
            total = now.number + added
            # A running mean without momentum: over `now.number` microbatches and those of the other copy.
            values = tuple(
                (now.number * ours + copy.number * theirs - before.number * first) / max(total, 1)
                for ours, theirs, first in zip(now.values, copy.values, before.values, strict=True)
            )
        else:
            left = (1 - momentum) ** added
            values = tuple(
                left * ours + theirs - left * first
                for ours, theirs, first in zip(now.values, copy.values, before.values, strict=True)
            )
        now = _Seen(now.number + added, values)
    return now


@torch.no_grad()
def _set(norm: RunningNormModule, seen: _Seen) -> None:
    for buffer, value in zip((norm.running_mean, norm.running_var), seen.values, strict=True):
        assert buffer is not None, "it tracks its statistics"
        buffer.copy_(value)
    assert norm.num_batches_tracked is not None, "it tracks its statistics"
    norm.num_batches_tracked.fill_(seen.number)
