"""What a rank keeps on the host, by its plan: the state of its optimizers, and what its forwards save."""

from collections.abc import Callable, Mapping

import torch
from torch.optim import Optimizer

from shardwise.planner.plan import Plan
from shardwise.runtime.offload.crossing import Crossing
from shardwise.runtime.offload.room import Gather, check_room
from shardwise.runtime.offload.stash import Stash
from shardwise.runtime.offload.states import HostStates


class Host:
    """The host's side of one rank, whose weights are on one device.

    `optimizers` are its own, with the bytes that each keeps for a number. All ranks of the world make theirs alike: the
    room that those of one machine need is added up, and refused here if it is not there.
    """

    def __init__(self, plan: Plan, device: torch.device, optimizers: Mapping[Optimizer, float], gather: Gather) -> None:
        self.crossing = Crossing(device)
        self.states: HostStates | None = None
        if plan.offload.optimizer:
            states = HostStates(optimizers, plan.offload.optimizer, self.crossing)
            check_room(plan, states.planned_bytes, gather)
            self.states = states
        self.stash = Stash(plan, self.crossing) if plan.offload.activations else None

    @property
    def num_bytes(self) -> int:
        """What this rank has on the host now."""
        return sum(each.num_bytes for each in (self.states, self.stash) if each is not None)

    def close(self) -> None:
        """Wait for what is under way, and end threads. State stays where it is."""
        for each in (self.states, self.stash):
            if each is not None:
                each.close()
        self.crossing.close()


def make_host(
    plan: Plan, device: torch.device, optimizers: Mapping[Optimizer, Callable[[], float]], gather: Gather
) -> Host | None:
    """The host's side, if the plan has one. Optimizers are asked for their bytes only then."""
    if not plan.offload.optimizer and not plan.offload.activations:
        return None
    asked = {each: number_bytes() for each, number_bytes in optimizers.items()} if plan.offload.optimizer else {}
    return Host(plan, device, asked, gather)
