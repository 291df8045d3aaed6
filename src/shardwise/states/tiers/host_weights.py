"""Weights that live on the host and come to the device for each use, and whose gradients live there too.

    compute   forward of 0, 1, 2, 3           | backward of 3, 2, 1, 0
    in          w0  w1  w2  w3                    w3  w2  w1  w0        one unit ahead
    out                                               g3  g2  g1  g0    while the backward goes on

A unit's weights come while the unit before it computes, and go when it has been computed: `states/unit_prefetch.py`
says when, as it does for weights that are gathered from other ranks. On the device a weight keeps one storage, which is
empty while it is away, so that what autograd has saved of it in a forward is the weight again in the backward.

A gradient leaves as soon as it is there. That of a later microbatch is added to what has left before: that comes in for
it and goes again, beside the computation. The update is that of any state on the host (`host_states.py`): weight and
gradient come with it.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.stages.stage import Stage, Wrappable
from shardwise.states.tiers.choose_offloaded import choose_fraction
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.swapped_storage import HostStorage
from shardwise.states.unit_prefetch import UnitPrefetch, named_in

_HALVES_OF_BACKWARD = (Kind.I, Kind.W)


class HostWeight:
    """A parameter whose numbers, and those of its gradient, are on the host. It is an `OffloadedWeight`."""

    gradient: Tensor
    _storage: HostStorage
    #: It is divided on its way out.
    scale = 1.0

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.num_bytes = parameter.nbytes * (2 if parameter.requires_grad else 1)
        self.has_gradient = False
        #: That of the whole gradient, as the device computes it, if it was asked for.
        self.norm: Tensor | None = None
        self.sent: list[Event] = []
        self._holders: set[object] = set()

    def move_in(self, copies: CopyStreams) -> None:
        """Take the host's memory, and give back the device's."""
        # Memory of its own: that of the parameter may be somebody else's too.
        here = self.parameter.detach().clone()
        self.parameter.data = here
        self._storage = HostStorage(here, copies)
        if self.parameter.requires_grad:
            self.gradient = copies.pinned(here.shape, here.dtype)

    @property
    def host(self) -> Tensor:
        """The numbers, where they live."""
        return self._storage.host

    @property
    def device_bytes(self) -> int:
        """What it takes on the device now."""
        return self._storage.device.untyped_storage().nbytes()

    def fetch(self) -> None:
        """It needs nothing else to be here before it can come."""

    def start(self) -> None:
        """Have it come, if it is not here or on its way."""
        self._storage.start()

    def hold(self, holder: object) -> None:
        """Have it here, for what is computed next, until `holder` lets go."""
        self._holders.add(holder)
        self.start()
        self._storage.follow()

    def let_go(self, holder: object) -> None:
        """This holder needs it no longer."""
        self._holders.discard(holder)
        if not self._holders:
            self.leave()

    def leave(self) -> None:
        """Nobody needs it."""
        self._holders.clear()
        self._storage.leave()

    def is_renewed(self, events: Sequence[Event]) -> None:
        """The numbers at home are new once these events are reached; what is here is old."""
        self._holders.clear()
        self._storage.is_renewed(events)

    def wait(self) -> None:
        """Have what is at home be the newest."""
        self._storage.wait()
        for event in self.sent:
            event.wait()


class HostWeights:
    """The weights of some units of this process's stages, on the host: at least a part of all bytes that units have.

    They are `Lodgers`: nothing is there before `move_in`. `apart` are the names of parameters that others add gradients
    to: they stay on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Mapping[int, Stage],
        fraction: float,
        *,
        apart: Collection[str] = (),
    ) -> None:
        self._layers = {number: UnitPrefetch(stage) for number, stage in stages.items() if isinstance(stage, Wrappable)}
        stays = named_in(module, {*apart, *(name for each in self._layers.values() for name in each.in_glue)})
        units = {
            unit: [each for each in module.get_submodule(unit).parameters() if each not in stays and _can_go(each)]
            for layers in self._layers.values()
            for unit in layers.units
        }
        self.weights = {each: HostWeight(each) for each in choose_fraction(units, fraction)}
        for layers in self._layers.values():
            own = {unit: [self.weights[each] for each in units[unit] if each in self.weights] for unit in layers.units}
            layers.attach(own)
        self._stage: int | None = None
        self._leaving = DeferredFree(DEFERRED_FREE_BYTES)

    @property
    def num_bytes(self) -> int:
        """What is on the host, once it has moved in."""
        return sum(each.num_bytes for each in self.weights.values())

    @property
    def device_bytes(self) -> int:
        """What of these weights is on the device now."""
        return sum(each.device_bytes for each in self.weights.values())

    @property
    def away_bytes(self) -> int:
        """What of these weights is not on the device now."""
        return sum(each.host.nbytes - each.device_bytes for each in self.weights.values())

    @property
    def homes(self) -> dict[nn.Parameter, Tensor]:
        """Where the numbers of each parameter are, the newest."""
        self.wait()
        return {parameter: each.host for parameter, each in self.weights.items()}

    @property
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradients of this step that are on the host, all of them there."""
        found = {parameter: each for parameter, each in self.weights.items() if each.has_gradient}
        for each in found.values():
            for event in each.sent:
                event.wait()
        return {parameter: each.gradient for parameter, each in found.items()}

    def move_in(self, copies: CopyStreams) -> None:
        """Take the host's memory."""
        self._copies = copies
        for each in self.weights.values():
            each.move_in(copies)

    @property
    def norms(self) -> dict[nn.Parameter, Tensor]:
        """The norms of gradients that were asked for, all of them there with `gradients`."""
        return {parameter: each.norm for parameter, each in self.weights.items() if each.norm is not None}

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self.let_go()
        for each in self.weights.values():
            each.has_gradient, each.norm = False, None

    def before(self, instruction: Instruction) -> None:
        """Something is about to be computed on a stage, and what was computed before has ended."""
        self.let_go()
        self._stage = instruction.stage if instruction.stage in self._layers else None
        if self._stage is not None and instruction.kind in _HALVES_OF_BACKWARD:
            # A half of a backward goes through units in an order of its own.
            self._layers[self._stage].enter_all()

    def let_go(self) -> None:
        """What was computed has ended: no weight is needed, and gradients that nobody told of go to the host too."""
        if self._stage is not None:
            self._layers[self._stage].leave_all()
            self._stage = None
        for parameter in self.weights:
            if parameter.grad is not None:
                self.send(parameter)

    @torch.no_grad()
    def send(self, parameter: nn.Parameter, divisor: float | None = None, *, measures: bool = False) -> None:
        """A gradient is there: it goes to the host, on top of what went there before in this step.

        The last of a step may be divided on its way; then its norm can be measured too.
        """
        weight = self.weights[parameter]
        assert parameter.grad is not None, "it has arrived"
        gradient = parameter.grad.contiguous()
        memory: tuple[Tensor, ...] = (gradient,)
        events: list[Event] = []
        parameter.grad = None
        weight.leave()
        if weight.has_gradient:
            total = torch.empty_like(gradient)
            arrives = self._copies.to_device(total, weight.gradient, [*weight.sent, *self._copies.computed()])
            events = self._copies.run_beside(partial(_finish, weight, total, gradient, divisor, measures), [arrives])
            memory = (total, gradient)
        else:
            _finish(weight, gradient, None, divisor, measures)
        event = self._copies.to_host(weight.gradient, memory[0], [*weight.sent, *events])
        weight.has_gradient, weight.sent = True, [event]
        self._leaving.hold(event, *memory)
        self._leaving.sweep()

    def wait(self) -> None:
        """Wait until what is at home is the newest."""
        for each in self.weights.values():
            each.wait()
        self._leaving.wait()

    def close(self) -> None:
        """Bring all weights back for good."""
        self.let_go()
        self.wait()
        for each in self.weights.values():
            each.hold(self)


def _can_go(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one run of numbers."""
    return parameter.layout is torch.strided and parameter.is_contiguous()


def _finish(weight: HostWeight, total: Tensor, more: Tensor | None, divisor: float | None, measures: bool) -> None:
    """Make a gradient what is to be on the host, on the device."""
    if more is not None:
        total.add_(more)
    if divisor is not None:
        total.div_(divisor)
        weight.norm = nn.utils.get_total_norm([total]) if measures else None
