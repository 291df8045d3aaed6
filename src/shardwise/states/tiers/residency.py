"""What comes to be updated beside an optimizer's state: nothing, or the weight and its gradient, or the weight alone.

Resident    a weight on the device, with its gradient there
Lodger      one that lives on the host with its gradient: both come, and it goes home again
Master      one of full precision on the host, of a parameter on the device that is computed with
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing

#: What comes beside an optimizer's own entries. No optimizer calls an entry so.
WEIGHT, GRADIENT = "(weight)", "(gradient)"

#: What is in a slot of one visit, under the optimizer's names and these.
Places = Mapping[str, Tensor]


class Visit(NamedTuple):
    """Some rows of a weight, or (None) all of it."""

    weight: nn.Parameter
    rows: slice | None

    def of(self, tensor: Tensor) -> Tensor:
        """What belongs to it of the weight, or of something that has a number for each of the weight's."""
        return tensor if self.rows is None else tensor[self.rows]


class Lodging(Protocol):
    """A weight that lives on the host."""

    #: Its numbers, and those of its gradient, in the weight's shape.
    @property
    def home(self) -> Tensor: ...
    @property
    def gradient(self) -> Tensor: ...

    #: Whether this step has a gradient, marks after which it is there, and what it is multiplied with.
    @property
    def has_gradient(self) -> bool: ...
    @property
    def sent(self) -> Sequence[Event]: ...
    @property
    def scale(self) -> float: ...

    def is_renewed(self, marks: Sequence[Event]) -> None:
        """The numbers at home are new once these marks are reached."""
        ...


class Resident:
    """A weight on the device. What others do, it does not need."""

    #: Whether an update writes what is computed with.
    is_here = True

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    @property
    def gradient(self) -> Tensor | None:
        """What it is updated with, if this step has any."""
        return self.weight.grad

    @property
    def has_gradient(self) -> bool:
        """Whether it is updated in this step."""
        return self.gradient is not None

    def homes(self, visit: Visit) -> dict[str, Tensor]:  # noqa: ARG002 - it is here
        """What comes with the state, from where it lives."""
        return {}

    def room(self, visit: Visit) -> dict[str, Tensor]:  # noqa: ARG002 - it is here
        """What comes later."""
        return {}

    def bring(self, visit: Visit, places: Places) -> list[Event]:  # noqa: ARG002 - it is here
        """Have come what was not there before; marks after which it is here."""
        return []

    def visitor(self, visit: Visit, places: Places) -> nn.Parameter:  # noqa: ARG002 - it is here
        """What the optimizer sees of it, with its gradient. This runs where updates do."""
        gradient = self.gradient
        assert gradient is not None, "without a gradient nothing is updated"
        found = nn.Parameter(visit.of(self.weight.detach()))
        found.grad = visit.of(gradient)
        _use_here(gradient)
        return found

    def finish(self, visit: Visit, places: Places) -> None:
        """This visit was updated, and this runs where that was."""

    def end(self) -> None:
        """All of it was updated in this step, or will be by what was put."""

    def leaving(self, visit: Visit, places: Places) -> list[tuple[Tensor, Tensor]]:  # noqa: ARG002 - it stays
        """What goes home beside the state: where it lives, and where it is."""
        return []

    def is_sent(self, marks: Sequence[Event]) -> None:
        """What goes home is there once these marks are reached."""


class Lodger(Resident):
    """A weight that lives on the host with its gradient."""

    is_here = False

    def __init__(self, weight: nn.Parameter, lodging: Lodging, crossing: Crossing) -> None:
        super().__init__(weight)
        self._lodging, self._crossing = lodging, crossing

    @property
    def has_gradient(self) -> bool:
        return self._lodging.has_gradient

    def homes(self, visit: Visit) -> dict[str, Tensor]:
        return {WEIGHT: visit.of(self._lodging.home)}

    def room(self, visit: Visit) -> dict[str, Tensor]:
        return {GRADIENT: visit.of(self._lodging.gradient)}

    def bring(self, visit: Visit, places: Places) -> list[Event]:
        return [self._crossing.inward(places[GRADIENT], visit.of(self._lodging.gradient), self._lodging.sent)]

    def visitor(self, visit: Visit, places: Places) -> nn.Parameter:  # noqa: ARG002 - all of it is in the slot
        found = nn.Parameter(places[WEIGHT])
        scale = self._lodging.scale
        gradient = places[GRADIENT] if scale == 1.0 else places[GRADIENT].mul_(scale)
        found.grad = gradient.to(found.dtype)
        return found

    def leaving(self, visit: Visit, places: Places) -> list[tuple[Tensor, Tensor]]:
        return [(visit.of(self._lodging.home), places[WEIGHT])]

    def is_sent(self, marks: Sequence[Event]) -> None:
        self._lodging.is_renewed(marks)


class Handed(Resident):
    """A weight on the device whose gradient is handed over, to be multiplied with something."""

    def __init__(self, weight: nn.Parameter, parameter: nn.Parameter) -> None:
        super().__init__(weight)
        self.parameter = parameter
        self._gradient: Tensor | None = None
        self._scale: float | None = None

    def take(self, gradient: Tensor | None, scale: float | None) -> None:
        """Have the gradient of a step, if there is one, until it was used."""
        self._gradient, self._scale = gradient, scale

    @property
    def gradient(self) -> Tensor | None:
        return self._gradient

    def visitor(self, visit: Visit, places: Places) -> nn.Parameter:
        assert self._gradient is not None, "without a gradient nothing is updated"
        found = nn.Parameter(self._numbers(visit, places))
        gradient = visit.of(self._gradient).to(found.dtype)
        found.grad = gradient if self._scale is None else gradient.mul(self._scale)
        _use_here(self._gradient)
        return found

    def end(self) -> None:
        self._gradient = None

    def _numbers(self, visit: Visit, places: Places) -> Tensor:  # noqa: ARG002 - they are here
        return visit.of(self.weight.data)


class Master(Handed):
    """A weight of full precision on the host, of a parameter on the device."""

    def homes(self, visit: Visit) -> dict[str, Tensor]:
        return {WEIGHT: visit.of(self.weight.data)}

    def finish(self, visit: Visit, places: Places) -> None:
        # What autograd has saved of the parameter has been used: it need not know of this.
        visit.of(self.parameter.data).copy_(places[WEIGHT])

    def leaving(self, visit: Visit, places: Places) -> list[tuple[Tensor, Tensor]]:
        return [(visit.of(self.weight.data), places[WEIGHT])]

    def _numbers(self, visit: Visit, places: Places) -> Tensor:  # noqa: ARG002 - they are in the slot
        return places[WEIGHT]


def _use_here(gradient: Tensor) -> None:
    """Its memory is the backward's, which does not know of the stream that updates."""
    if gradient.is_cuda:
        gradient.record_stream(torch.cuda.current_stream(gradient.device))
