"""Tensor parallelism within experts: every rank has all experts, and its channels of each.

Each rank's outputs are partial sums. So are its gradients of the experts' arguments: the tokens, and the weights with
which the router mixes their outputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, copy, sum_over
from shardwise.sharding.tensor.sharding import Runs, runs_of
from shardwise.sharding.wrap_forward import wrap_forward


def expert_runs(experts: nn.Module, num_ranks: int) -> dict[str, tuple[int, tuple[Runs, ...]]] | str:
    """Return for each parameter the dim that is cut and the runs of each rank; or why these experts stay whole.

    The supported form is gates over ups as (experts, 2 x channels, hidden), and downs as (experts, hidden, channels).
    """
    parameters = dict(experts.named_parameters())
    up, down = parameters.pop("gate_up_proj", None), parameters.pop("down_proj", None)
    if up is None or down is None or parameters or up.dim() != 3 or down.dim() != 3:
        return "its parameters are not gates over ups and downs, one expert after the other"
    channels = down.shape[2]
    if up.shape[1] != 2 * channels:
        return f"{up.shape[1]} gates and ups do not go with {channels} channels"
    if channels < num_ranks:
        return f"an expert has {channels} channels, fewer than tp={num_ranks}"
    mine = _in_eights(channels, num_ranks)
    return {
        "gate_up_proj": (1, tuple(runs_of(np.concatenate([some, some + channels])) for some in mine)),
        "down_proj": (2, tuple(runs_of(some) for some in mine)),
    }


def _in_eights(channels: int, num_ranks: int) -> list[NDArray[np.int64]]:
    """Return the channels of each rank, in eights if there are enough: grouped matmuls need rows of whole 16 bytes."""
    step = 8 if channels >= 8 * num_ranks else 1
    starts = [int(some[0]) * step for some in np.array_split(np.arange(-(-channels // step)), num_ranks)]
    return [np.arange(start, stop) for start, stop in zip(starts, [*starts[1:], channels], strict=True)]


def share_experts(experts: nn.Module, group: Group) -> None:
    """Make experts, whose parameters are this rank's channels already, sum their outputs over the ranks."""

    def wrapped(call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        copied = [_copied(each, group) for each in args]
        return sum_over(call(*copied, **{key: _copied(each, group) for key, each in kwargs.items()}), group)

    wrap_forward(experts, wrapped)


def _copied(each: Any, group: Group) -> Any:
    return copy(each, group) if isinstance(each, Tensor) and each.is_floating_point() else each
