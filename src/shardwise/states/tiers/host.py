"""What a rank keeps on the host, by its plan: weights, the state of its optimizers, and what its forwards save."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.planner.plan import Offload, Plan
from shardwise.schedule.instruction import Instruction
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Stage
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_memory import Gather, check_room
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.host_weights import HostWeights
from shardwise.states.tiers.optimizer_in_backward import Early, FindCount, can_be_early
from shardwise.states.tiers.residency import OffloadedWeight


class Lodgers(Protocol):
    """Weights that live on the host, and their gradients."""

    @property
    def weights(self) -> Mapping[nn.Parameter, OffloadedWeight]:
        """What optimizers have of them."""
        ...

    @property
    def num_bytes(self) -> int:
        """What is on the host, once they have moved in."""
        ...

    @property
    def away_bytes(self) -> int:
        """What of the parameters that a rank counts as its own is not on the device now."""
        ...

    def move_in(self, copies: CopyStreams) -> None: ...

    def begin_step(self) -> None: ...

    def wait(self) -> None:
        """Wait until what is at home is the newest."""
        ...

    def close(self) -> None:
        """Bring all weights back for good."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a rank's weights are used: its module, the stages that it runs, by number, and their schedule.

    `apart` are the names of parameters whose gradients others add to. `lodgers` is what will live on the host, where
    somebody else brings weights to their use.
    """

    module: nn.Module
    stages: Mapping[int, Stage]
    schedule: Schedule
    apart: Collection[str]
    lodgers: Lodgers | None = None


class Host:
    """The host's side of one rank, whose weights are on one device.

    `optimizers` are its own, with the bytes that each keeps for a number. All ranks of the world make theirs alike: the
    room that those of one machine need is added up, and refused here if it is not there.
    """

    def __init__(
        self, plan: Plan, device: torch.device, optimizers: Mapping[Optimizer, float], gather: Gather, scene: Scene
    ) -> None:
        self.copies, self._scene, share = CopyStreams(device), scene, plan.offload
        self.states: HostStates | None = None
        self.weights: HostWeights | None = None
        if share.parameters and scene.lodgers is None:
            self.weights = HostWeights(scene.module, scene.stages, share.parameters, apart=scene.apart)
        self._lodgers = scene.lodgers if self.weights is None else self.weights
        if share.optimizer or share.parameters:
            lodged = {} if self._lodgers is None else self._lodgers.weights
            states = HostStates(optimizers, share.optimizer, self.copies, lodged)
            num_bytes = 0 if self._lodgers is None else self._lodgers.num_bytes
            check_room(plan, states.planned_bytes + num_bytes, gather)
            self.states = states
        if self._lodgers is not None:
            self._lodgers.move_in(self.copies)
        self.stash = ActivationOffload(plan, self.copies) if share.activations else None
        self._early: Early | None = None

    def update_early(self, find_count: FindCount, *, waits: bool) -> None:
        """Have weights updated as soon as their gradients are final, and waited for where they are used: `Early`."""
        scene = self._scene
        assert self.weights is None or can_be_early(scene.schedule), "composition.py refuses weights on the host here"
        if self.states is not None and can_be_early(scene.schedule):
            self._early = Early(
                self.states,
                self.weights,
                scene.module,
                scene.stages,
                scene.schedule,
                apart=scene.apart,
                find_count=find_count,
                waits=waits,
            )

    @property
    def before(self) -> Callable[[Instruction], None] | None:
        """What is to be called before each computation."""
        return None if self._early is None else self._early.before

    def begin_step(self) -> None:
        """A step begins."""
        if self._early is not None:
            self._early.begin_step()
        if self._lodgers is not None:
            self._lodgers.begin_step()
        if self.states is not None:
            self.states.begin()

    def gradients_of(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The gradients of a step that are there, by name, wherever they are."""
        away: Mapping[nn.Parameter, Tensor] = {}
        if self.weights is not None:
            self.weights.let_go()
            away = self.weights.gradients
        found = {name: away.get(each, each.grad) for name, each in trained.items()}
        return {name: each for name, each in found.items() if each is not None}

    @property
    def norms(self) -> Mapping[nn.Parameter, Tensor]:
        """The norms of some of these, as the device has computed them."""
        return {} if self.weights is None else self.weights.norms

    @property
    def divided(self) -> Collection[nn.Parameter]:
        """Parameters whose gradients have been divided by what the whole batch counts."""
        return () if self._early is None else self._early.divided

    @property
    def homes(self) -> Mapping[nn.Parameter, Tensor]:
        """Where the numbers are of parameters that live on the host."""
        return {} if self.weights is None else self.weights.homes

    @property
    def num_bytes(self) -> int:
        """What this rank has on the host now."""
        return sum(each.num_bytes for each in (self._lodgers, self.states, self.stash) if each is not None)

    @property
    def away_bytes(self) -> int:
        """What of this rank's parameters is not on the device now."""
        return 0 if self._lodgers is None else self._lodgers.away_bytes

    def wait(self) -> None:
        """Wait until all state is on the host, and what is computed from now on uses the new weights."""
        if self.states is not None:
            self.states.wait()
        if self._lodgers is not None:
            self._lodgers.wait()

    def close(self) -> None:
        """Wait for what is under way, and end threads. State stays where it is, weights come back."""
        if self._early is not None:
            self._early.close()
        for each in (self.states, self._lodgers, self.stash):
            if each is not None:
                each.close()
        self.copies.close()


def make_host(
    plan: Plan,
    device: torch.device,
    optimizers: Mapping[Optimizer, Callable[[], float]],
    gather: Gather,
    scene: Scene,
) -> Host | None:
    """The host's side, if the plan has one. Optimizers are asked for their bytes only then."""
    if plan.offload == Offload():
        return None
    has_state = plan.offload.optimizer or plan.offload.parameters
    asked = {each: number_bytes() for each, number_bytes in optimizers.items()} if has_state else {}
    return Host(plan, device, asked, gather, scene)
