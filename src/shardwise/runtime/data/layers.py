"""Weights gathered unit by unit while a stage computes (zero 3), or waited for unit by unit (zero 1 and 2).

A unit's weights come in while the unit before it computes, forwards and backwards, and go when it has been computed:

    forward      gather 0   run 0, gather 1    run 1, gather 2    run 2
                            release 0          release 1          release 2
    backward     gather 2   back 2, gather 1   back 1, gather 0   back 0

So the weights of two units are there at most. A backward begins at a unit when the gradient of one of its outputs is
there; it is done with the unit when all gradients of its weights have arrived.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.runtime.data.bucket import Bucket

Call = Callable[..., Any]


@runtime_checkable
class Wrappable(Protocol):
    """A stage that lets something be put around the calls of its units."""

    def wrap(self, around: Callable[[str, Call], Call]) -> None: ...


class Layers:
    """The units of one stage, in the order in which they are called."""

    def __init__(self, stage: Wrappable) -> None:
        self.units: list[str] = []
        self._buckets: Mapping[str, Sequence[Bucket]] = {}
        stage.wrap(self._around)

    def attach(self, buckets: Mapping[str, Sequence[Bucket]]) -> None:
        """Say which buckets have the weights of each unit."""
        self._buckets = buckets

    def _around(self, unit: str, call: Call) -> Call:
        self.units.append(unit)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(unit, ahead=1)
            output = call(*args, **kwargs)
            if torch.is_grad_enabled():
                for leaf in pytree.tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _: self._enter(unit, ahead=-1))  # type: ignore[no-untyped-call]
            self.leave(unit)
            return output

        return run

    def _enter(self, unit: str, *, ahead: int) -> None:
        """Have a unit's weights here, and those of the unit that is computed after it on the way."""
        for bucket in self._buckets.get(unit, ()):
            bucket.weights.hold(unit)
        place = self.units.index(unit) + ahead
        if 0 <= place < len(self.units):
            for bucket in self._buckets.get(self.units[place], ()):
                bucket.weights.start()

    def leave(self, unit: str) -> None:
        """A unit needs its weights no longer."""
        for bucket in self._buckets.get(unit, ()):
            bucket.weights.let_go(unit)

    def leave_all(self) -> None:
        """The computation has ended, whatever it used."""
        for unit in self.units:
            self.leave(unit)


def find_units(layers: Iterable[Layers], module: nn.Module) -> dict[int, str]:
    """The unit of each parameter, by its id: those that several units use, of whichever stages, have none."""
    found: dict[int, list[str]] = {}
    for unit in [unit for each in layers for unit in each.units]:
        for parameter in module.get_submodule(unit).parameters():
            found.setdefault(id(parameter), []).append(unit)
    return {identity: units[0] for identity, units in found.items() if len(units) == 1}
