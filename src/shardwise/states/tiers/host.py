"""What a rank keeps on the host, by its plan: weights, the state of its optimizers, and what its forwards save."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.planner.plan import Offload, Plan
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_memory import Gather, check_room
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.residency import OffloadedWeight


class OffloadedParameters(Protocol):
    """Weights that live on the host, and their gradients: `buckets/offloaded_buckets.py`."""

    @property
    def weights(self) -> Mapping[nn.Parameter, OffloadedWeight]:
        """What optimizers have of them."""
        ...

    @property
    def num_bytes(self) -> int:
        """What is on the host, once they have moved in."""
        ...

    def move_in(self, copies: CopyStreams) -> None: ...

    def begin_step(self) -> None: ...

    def wait(self) -> None:
        """Wait until what is on the host is the newest."""
        ...

    def close(self) -> None:
        """Leave all weights on the host for good."""
        ...


class Host:
    """The host's side of one rank, whose weights are on one device.

    `optimizers` are its own, with the bytes that each keeps for a number; `offloaded` are weights that live there. All
    ranks of the world make theirs alike: the room that those of one machine need is added up, and refused here if it is
    not there.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        optimizers: Mapping[Optimizer, float],
        gather: Gather,
        offloaded: OffloadedParameters | None,
    ) -> None:
        self.copies, self._offloaded, share = CopyStreams(device), offloaded, plan.offload
        # States wait for staging buffers, and must not keep weights waiting that come for the next unit.
        self._state_copies = CopyStreams(device)
        self.states: HostStates | None = None
        if share.optimizer or share.parameters:
            weights = {} if offloaded is None else offloaded.weights
            states = HostStates(optimizers, share.optimizer, self._state_copies, weights)
            num_bytes = 0 if offloaded is None else offloaded.num_bytes
            check_room(plan, states.planned_bytes + num_bytes, gather)
            self.states = states
        if offloaded is not None:
            offloaded.move_in(self.copies)
        self.activations = ActivationOffload(plan, self.copies) if share.activations else None

    def begin_step(self) -> None:
        """A step begins."""
        if self._offloaded is not None:
            self._offloaded.begin_step()
        if self.states is not None:
            self.states.begin()

    @property
    def num_bytes(self) -> int:
        """What this rank has on the host now."""
        return sum(each.num_bytes for each in (self._offloaded, self.states, self.activations) if each is not None)

    def wait(self) -> None:
        """Wait until all state is on the host, and what is computed from now on uses the new weights."""
        for each in (self.states, self._offloaded):
            if each is not None:
                each.wait()

    def close(self) -> None:
        """Wait for what is under way, and end threads. State and weights stay where they are."""
        for each in (self.states, self._offloaded, self.activations):
            if each is not None:
                each.close()
        self.copies.close()
        self._state_copies.close()


def make_host(
    plan: Plan,
    device: torch.device,
    optimizers: Mapping[Optimizer, Callable[[], float]],
    gather: Gather,
    offloaded: OffloadedParameters | None,
) -> Host | None:
    """The host's side, if the plan has one. Optimizers are asked for their bytes only then."""
    if plan.offload == Offload():
        return None
    has_state = plan.offload.optimizer or plan.offload.parameters
    asked = {each: number_bytes() for each, number_bytes in optimizers.items()} if has_state else {}
    return Host(plan, device, asked, gather, offloaded)
