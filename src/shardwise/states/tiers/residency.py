"""Where a weight lives, and so what is copied to the device with its optimizer state for an update.

    residency          the weight     its gradient    comes with the state      goes home with it
    Residency          device         device          nothing                   nothing
    HandedGradient     device         handed over     nothing                   nothing
    MasterWeight       host, fp32     handed over     the master weight         the master weight
    HostResidency      host           host            weight, then gradient     the weight
      in a backward    device         device          nothing                   the weight

A weight that lives on the host is on the device for its backward, and its gradient is there when the backward ends. If
it is updated then, neither needs another copy. A `MasterWeight` belongs to a parameter on the device that is used in
computation, in less than full precision.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.dataflow.streams import Event
from shardwise.states.scaling import multiply
from shardwise.states.tiers.copy_streams import CopyStreams

#: Keys besides an optimizer's own entries, which never have such names.
WEIGHT, GRADIENT = "(weight)", "(gradient)"

#: The staging buffer's tensors of one weight, under the optimizer's keys and these.
Places = Mapping[str, Tensor]


class WeightSlice(NamedTuple):
    """Some rows of a weight, or (None) all of it."""

    weight: nn.Parameter
    rows: slice | None

    @property
    def first(self) -> int:
        """The first row."""
        return 0 if self.rows is None else int(self.rows.start)

    def of(self, tensor: Tensor) -> Tensor:
        """Return its part of the weight, or of a tensor with an element for each of the weight's."""
        return tensor if self.rows is None else tensor[self.rows]


class OffloadedWeight(Protocol):
    """A weight that lives on the host."""

    #: Its values, and those of its gradient, in the weight's shape.
    @property
    def host(self) -> Tensor: ...
    @property
    def gradient(self) -> Tensor: ...

    #: Whether this step has a gradient, events after which it is there, and the factor on it.
    @property
    def has_gradient(self) -> bool: ...
    @property
    def sent(self) -> Sequence[Event]: ...
    @property
    def scale(self) -> float: ...

    #: Whether updates are expected while weight and gradient are on the device, for a backward that is just over.
    @property
    def hands_over_weight(self) -> bool: ...
    @property
    def hands_over_gradient(self) -> bool: ...

    #: On the device: the weight, after `hold`, and the gradient, if it is there.
    @property
    def weight_here(self) -> Tensor: ...
    @property
    def gradient_here(self) -> Tensor | None: ...

    def hold(self) -> bool:
        """Keep the weight on the device until it is updated; return whether it was there."""
        ...

    def is_updated(self) -> None:
        """Record that all of it was updated in this step."""
        ...

    def is_renewed(self, events: Sequence[Event]) -> None:
        """Record that the values on the host are new once these events are reached."""
        ...


class Residency:
    """A weight on the device. It needs none of what the others do."""

    #: Whether an update writes the weight that is used in computation.
    is_on_device = True
    #: The factor on the gradient, if it is not applied yet.
    _scale: float | None = None

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    @property
    def gradient(self) -> Tensor | None:
        """Return the gradient to update with, if this step has one."""
        return self.weight.grad

    @property
    def has_gradient(self) -> bool:
        """Whether it is updated in this step."""
        return self.gradient is not None

    def incoming(self, part: WeightSlice) -> dict[str, Tensor]:  # noqa: ARG002 - it is here
        """Return what is copied with the state, from where it lives."""
        return {}

    def reserved(self, part: WeightSlice) -> dict[str, Tensor]:  # noqa: ARG002 - it is here
        """Return what is copied later, and needs space."""
        return {}

    def bring(self, part: WeightSlice, places: Places) -> list[Event]:  # noqa: ARG002 - it is here
        """Copy what was not there before; return events after which it is here."""
        return []

    def stand_in(self, part: WeightSlice, places: Places) -> nn.Parameter:
        """Return the optimizer's substitute for it, with its gradient. Runs in the stream of updates."""
        gradient = self.gradient
        assert gradient is not None, "without a gradient nothing is updated"
        found = nn.Parameter(self._numbers(part, places))
        vars(found).update(vars(self.weight))  # A step may read `parameter.lr_scale`.
        own = part.of(gradient).to(found.dtype)
        found.grad = own if self._scale is None else own.mul(self._scale)
        _use_here(gradient)
        return found

    def _numbers(self, part: WeightSlice, places: Places) -> Tensor:  # noqa: ARG002 - they are here
        return part.of(self.weight.detach())

    def finish(self, part: WeightSlice, places: Places) -> None:
        """Finish the update of this part. Runs in the stream of updates."""

    def end(self) -> None:
        """Finish the update of the whole weight in this step, which is done or launched."""

    def outgoing(self, part: WeightSlice, places: Places) -> list[tuple[Tensor, Tensor]]:  # noqa: ARG002 - it stays
        """Return what is copied back with the state: target and source."""
        return []

    def is_sent(self, events: Sequence[Event]) -> None:
        """Record that what is copied back has arrived once these events are reached."""


class HostResidency(Residency):
    """A weight that lives on the host with its gradient."""

    def __init__(self, weight: nn.Parameter, offloaded: OffloadedWeight, copies: CopyStreams) -> None:
        super().__init__(weight)
        self._offloaded, self._copies = offloaded, copies
        #: Gradients that were not on the device when expected, by their start in the weight.
        self._brought: dict[int, Tensor] = {}
        self._has_ended = False

    @property
    def is_on_device(self) -> bool:  # type: ignore[override]
        return self._offloaded.hands_over_weight

    @property
    def has_gradient(self) -> bool:
        return self._offloaded.has_gradient

    def incoming(self, part: WeightSlice) -> dict[str, Tensor]:
        return {} if self._offloaded.hands_over_weight else {WEIGHT: part.of(self._offloaded.host)}

    def reserved(self, part: WeightSlice) -> dict[str, Tensor]:
        return {} if self._offloaded.hands_over_gradient else {GRADIENT: part.of(self._offloaded.gradient)}

    def bring(self, part: WeightSlice, places: Places) -> list[Event]:
        was_here = not self._offloaded.hands_over_weight or self._offloaded.hold()
        events = [] if was_here else self._copies.computed()
        if GRADIENT not in places and self._offloaded.gradient_here is not None:
            return events
        host, after = part.of(self._offloaded.gradient), list(self._offloaded.sent)
        place = places.get(GRADIENT)
        if place is None:
            place = self._brought[part.first] = torch.empty_like(host, device=self._copies.device)
            after += self._copies.computed()
        return [*events, self._copies.to_device(place, host, after)]

    def stand_in(self, part: WeightSlice, places: Places) -> nn.Parameter:
        found = nn.Parameter(self._numbers(part, places))
        vars(found).update(vars(self.weight))  # A step may read `parameter.lr_scale`.
        found.grad = self._scaled(part, places).to(found.dtype)
        return found

    def end(self) -> None:
        self._has_ended = True

    def outgoing(self, part: WeightSlice, places: Places) -> list[tuple[Tensor, Tensor]]:
        return [(part.of(self._offloaded.host), self._numbers(part, places))]

    def is_sent(self, events: Sequence[Event]) -> None:
        self._offloaded.is_renewed(events)
        if self._has_ended:
            self._has_ended = False
            self._offloaded.is_updated()

    def _numbers(self, part: WeightSlice, places: Places) -> Tensor:
        return places[WEIGHT] if WEIGHT in places else part.of(self._offloaded.weight_here)

    def _scaled(self, part: WeightSlice, places: Places) -> Tensor:
        factor = self._offloaded.scale
        if GRADIENT in places:
            return multiply(places[GRADIENT], factor)
        found = self._brought.pop(part.first, None)
        if found is None:
            here = self._offloaded.gradient_here
            assert here is not None, "it was brought, or is on the device still"
            found = part.of(here)
        _use_here(found)
        return found if factor == 1.0 else multiply(found.clone(), factor)


class HandedGradient(Residency):
    """A weight on the device whose gradient is passed in, with a factor."""

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        super().__init__(weight)
        self.parameter = parameter
        self._gradient: Tensor | None = None

    def take(self, gradient: Tensor | None, scale: float | None) -> None:
        """Take the gradient of a step, if there is one, until it is used."""
        self._gradient, self._scale = gradient, scale

    @property
    def gradient(self) -> Tensor | None:
        return self._gradient

    def _numbers(self, part: WeightSlice, places: Places) -> Tensor:
        # Through `data`: other backwards run at the same time, and the version counter must not change.
        return places.get(WEIGHT, part.of(self.weight.data))

    def end(self) -> None:
        self._gradient = None


class MasterWeight(HandedGradient):
    """A full-precision weight on the host, of a parameter on the device."""

    def incoming(self, part: WeightSlice) -> dict[str, Tensor]:
        return {WEIGHT: part.of(self.weight.data)}

    def finish(self, part: WeightSlice, places: Places) -> None:
        # Autograd has already used what it saved of the parameter, so the version counter need not change.
        part.of(self.parameter.data).copy_(places[WEIGHT])

    def outgoing(self, part: WeightSlice, places: Places) -> list[tuple[Tensor, Tensor]]:
        return [(part.of(self.weight.data), places[WEIGHT])]


def _use_here(gradient: Tensor) -> None:
    """Keep the gradient's memory until the updating stream has read it: it was allocated by the backward."""
    if gradient.is_cuda:
        gradient.record_stream(torch.cuda.current_stream(gradient.device))
