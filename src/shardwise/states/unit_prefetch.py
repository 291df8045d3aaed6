"""Weights gathered unit by unit while a stage computes (zero 3), or waited for unit by unit (zero 1 and 2).

A unit's weights come in while the unit before it computes, forwards and backwards, and go when it has been computed:

    forward      gather 0   run 0, gather 1    run 1, gather 2    run 2
                            release 0          release 1          release 2
    backward     gather 2   back 2, gather 1   back 1, gather 0   back 0

So the weights of two units are there at most. A backward begins at a unit when the gradient of one of its outputs is
there; it is done with the unit when all gradients of its weights have arrived.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.stage import Call
from shardwise.torch_private import pytree


class Prefetchable(Protocol):
    """Weights that are not always here."""

    def fetch(self) -> None:
        """Have here what must be before they can come."""
        ...

    def start(self) -> None:
        """Have them come."""
        ...

    def hold(self, holder: object) -> None:
        """Have them here until `holder` lets go."""
        ...

    def let_go(self, holder: object) -> None:
        """This holder needs them no longer."""
        ...


class UnitPrefetch:
    """The units of one stage, in the order in which they are called."""

    def __init__(self, stage: ModuleStage) -> None:
        self.units: list[str] = []
        self.in_glue = stage.flow.in_glue
        self._weights: Mapping[str, Sequence[Prefetchable]] = {}
        stage.wrap(self._around)

    def attach(self, weights: Mapping[str, Sequence[Prefetchable]]) -> None:
        """Say what the weights of each unit are."""
        self._weights = weights

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
        place = self.units.index(unit)
        for each in self._weights.get(unit, ()):
            each.hold(unit)
        for each in self._at(place + ahead):
            each.start()
        for each in self._at(place + 2 * ahead):
            each.fetch()

    def _at(self, place: int) -> Sequence[Prefetchable]:
        return self._weights.get(self.units[place], ()) if 0 <= place < len(self.units) else ()

    def leave(self, unit: str) -> None:
        """A unit needs its weights no longer."""
        for each in self._weights.get(unit, ()):
            each.let_go(unit)

    def enter_all(self) -> None:
        """Have the weights of all units here."""
        for unit in self.units:
            self._enter(unit, ahead=1)

    def leave_all(self) -> None:
        """The computation has ended, whatever it used."""
        for unit in self.units:
            self.leave(unit)


def find_users(layers: Iterable[UnitPrefetch], module: nn.Module) -> dict[int, list[str]]:
    """The units, of whichever stages, that use each parameter, by its id: where nothing else does."""
    found: dict[int, list[str]] = {}
    every = list(layers)
    in_glue = named_in(module, {name for each in every for name in each.in_glue})
    for unit in [unit for each in every for unit in each.units]:
        for parameter in module.get_submodule(unit).parameters():
            found.setdefault(id(parameter), []).append(unit)
    outside = {id(each) for each in in_glue}
    return {identity: units for identity, units in found.items() if identity not in outside}


def named_in(module: nn.Module, names: Collection[str]) -> set[nn.Parameter]:
    """The parameters that have one of these names."""
    return {each for name, each in module.named_parameters(remove_duplicate=False) if name in names}
