"""Whether the host has room for what ranks are about to keep there, asked before any of it is there."""

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cluster.local import available_bytes
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Plan

#: Gives what each rank of the world gives.
Gather = Callable[[Any], list[Any]]

# The probe's size along each dim: state of a matrix's rows and columns is then half of a number for each of its own.
_PROBED = 4


def number_bytes_of(make: Callable[[Iterable[nn.Parameter]], Optimizer], weights: Sequence[nn.Parameter]) -> float:
    """The bytes that an optimizer keeps for a number, seen by stepping one on small weights like these.

    Counts of steps, which are single numbers, are none. Where state is of rows and columns, this is more than it takes.
    """
    dims = sorted({each.dim() for each in weights} or {1})
    with torch.random.fork_rng(devices=[]):
        device = weights[0].device if weights else torch.device("cpu")
        probes = [nn.Parameter(torch.zeros([_PROBED] * dim, device=device)) for dim in dims]
        optimizer = make(probes)
        for each in probes:
            each.grad = torch.zeros_like(each)
        optimizer.step()
    return max(_state_bytes(optimizer, each) / each.numel() for each in probes)


def _state_bytes(optimizer: Optimizer, weight: nn.Parameter) -> int:
    state = optimizer.state.get(weight, {})
    return sum(each.nbytes for each in state.values() if isinstance(each, Tensor) and each.dim())


def check_room(plan: Plan, num_bytes: int, gather: Gather) -> None:
    """Refuse more than the host of this machine has, for all ranks on it. All ranks of the world call this."""
    here = socket.gethostname()
    told = [each for machine, each in gather((here, num_bytes)) if machine == here]
    check_host_memory(plan, sum(told), num_ranks=len(told), available=available_bytes())
