"""When the weights of a rank's stages are gathered: each unit waits for its own, the stage for the rest.

Weights are gathered unit by unit while a stage computes (zero 3), or waited for unit by unit (zero 1 and 2). In forward
and backward, a unit's weights are gathered while the unit before it computes, and freed when it has been computed:

    forward      gather 0   run 0, gather 1    run 1, gather 2    run 2
                            release 0          release 1          release 2
    backward     gather 2   back 2, gather 1   back 1, gather 0   back 0

So at most the weights of two units are there. The backward of a unit begins when the gradient of one of its outputs
arrives, and ends when all gradients of its weights have arrived.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.kernels.lazy_logits import LazyLogits
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.stages.left_in_arguments import has_containers, tensors_left
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.stage import Call
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.make import HeldStages, Users, ZeroConfig
from shardwise.states.buckets.offloaded_weights import OffloadedWeights, OffloadedWhole
from shardwise.states.buckets.reducer import MAKES_GRADIENTS
from shardwise.states.buckets.weights import Weights
from shardwise.torch_private import backward_id, before_gradient, is_wrapped, pytree

_HALVES_OF_BACKWARD = (Kind.I, Kind.W)


class UnitPrefetch:
    """The units of one stage, in the order in which they are called."""

    def __init__(self, stage: ModuleStage) -> None:
        self.units: list[str] = []
        self.in_glue = stage.flow.in_glue
        #: By unit, all parameters that its calls read, also those of other modules: blocks may refer to the root.
        self.touched: dict[str, set[str]] = {}
        for call in stage.flow.calls:
            self.touched.setdefault(call.unit, set()).update(call.touched)
        #: The weights that are gathered for each unit, or that it waits for.
        self.weights: Mapping[str, Sequence[Weights]] = {}
        #: The current computation of the stage.
        self.kind: Kind | None = None
        stage.wrap(self._around)

    def _around(self, unit: str, call: Call) -> Call:
        self.units.append(unit)

        def run(*args: Any, **kwargs: Any) -> Any:
            if backward_id() >= 0:
                # Recomputed for a checkpoint. If its first run had no graph, no gradient has announced the backward.
                self._enter(unit, ahead=-1)
                return call(*args, **kwargs)
            self._enter(unit, ahead=1)
            given = (*args, *kwargs.values())
            known = {id(each): each for each in tensors_left(given)} if has_containers(given) else None
            output = call(*args, **kwargs)
            leaves = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]
            if known is not None:
                leaves += [each for each in tensors_left(given) if id(each) not in known]
            for leaf in leaves if torch.is_grad_enabled() else ():
                self._check_is_announced(unit, leaf)
                if isinstance(leaf, LazyLogits):
                    leaf.on_gradient(lambda _: self._go_back(unit))
                elif leaf.requires_grad:
                    before_gradient(leaf, partial(self._go_back, unit))
            # Lazy logits need the weight until their loss, which is in the same computation (`end`).
            if not any(isinstance(leaf, LazyLogits) for leaf in leaves):
                self.leave(unit)
            return output

        return run

    def _check_is_announced(self, unit: str, leaf: Tensor) -> None:
        """Refuse outputs inside of `torch.func.vmap`: no gradient of theirs tells that the unit's backward begins."""
        if is_wrapped(leaf) and any(map(_goes, self.weights.get(unit, ()))):
            raise ShardwiseError(
                f"the forward calls {unit} inside of torch.func (vmap), where its backward is not announced, and its"
                " weights come for a unit and go when it has been computed (zero=3, offload.parameters)",
                remedy="zero=2 or less, without offload.parameters; or call it on all rows at once",
            )

    def _go_back(self, unit: str) -> None:
        """Start a unit's backward: the gradient of one of its outputs has arrived."""
        if self.kind is Kind.F and any(map(_goes, self.weights.get(unit, ()))):
            raise ShardwiseError(
                f"gradients are asked for in a forward, through {unit}, and its weights are not kept that long: they"
                " come for a unit and go when it has been computed (zero=3, offload.parameters)",
                remedy="zero=2 or less, without offload.parameters",
            )
        self._enter(unit, ahead=-1)

    def _enter(self, unit: str, *, ahead: int) -> None:
        """Wait for a unit's weights, and prefetch those of the unit that is computed after it."""
        place = self.units.index(unit)
        for each in self.weights.get(unit, ()):
            each.hold(unit)
        for each in self._at(place + ahead):
            each.start()
        for each in self._at(place + 2 * ahead):
            each.fetch()

    def _at(self, place: int) -> Sequence[Weights]:
        return self.weights.get(self.units[place], ()) if 0 <= place < len(self.units) else ()

    def leave(self, unit: str) -> None:
        """Release the weights of a unit."""
        for each in self.weights.get(unit, ()):
            each.let_go(unit)

    def enter_all(self) -> None:
        """Wait for the weights of all units."""
        for unit in self.units:
            self._enter(unit, ahead=1)

    def leave_all(self) -> None:
        """Release the weights of all units at the end of a computation."""
        for unit in self.units:
            self.leave(unit)


def make_unit_prefetch(held: HeldStages, sharing: ZeroConfig) -> dict[int, UnitPrefetch]:
    """Return prefetches by stage, if weights are gathered by unit, may be offloaded, or are updated late."""
    comes = sharing.zero > 0 and (sharing.zero < 3 or sharing.layerwise)
    if held.module is None or not (comes or sharing.offloaded or sharing.updates_late):
        return {}
    return {number: UnitPrefetch(stage) for number, stage in held.stages.items() if isinstance(stage, ModuleStage)}


def find_users(layers: Iterable[UnitPrefetch], module: nn.Module | None) -> dict[int, list[str]]:
    """Return the units of any stage that use each parameter, by its id, if nothing else uses it."""
    if module is None:
        return {}
    found: dict[int, list[str]] = {}
    every = list(layers)
    in_glue = {name for each in every for name in each.in_glue}
    named = dict(module.named_parameters(remove_duplicate=False))
    for each in every:
        for unit in each.units:
            touched = [named[name] for name in each.touched.get(unit, ()) if name in named]
            for parameter in {id(one): one for one in (*module.get_submodule(unit).parameters(), *touched)}.values():
                found.setdefault(id(parameter), []).append(unit)
    outside = {id(each) for name, each in module.named_parameters(remove_duplicate=False) if name in in_glue}
    return {identity: units for identity, units in found.items() if identity not in outside}


class StageWeights:
    """The buckets of each stage."""

    def __init__(
        self, stages: Iterable[int], units: Mapping[int, UnitPrefetch], buckets: Sequence[Bucket], users: Users
    ) -> None:
        self._units = units
        self._buckets = {number: [each for each in buckets if number in each.key.stages] for number in stages}
        #: Weights that no unit waits for, so that the stage does.
        self._loose = {
            number: [each for each in mine if number not in units or not _units_of(each, users)]
            for number, mine in self._buckets.items()
        }
        for number, prefetch in units.items():
            prefetch.weights = {
                unit: [each.weights for each in self._buckets[number] if unit in _units_of(each, users)]
                for unit in prefetch.units
            }
        self._has_offloaded = any(bucket.is_offloaded for bucket in buckets)

    def gather(self, stage: int) -> None:
        """Start to gather a stage's weights."""
        for bucket in self._buckets[stage]:
            bucket.weights.claim(stage)

    def release(self, stage: int) -> None:
        """Release them."""
        for bucket in self._buckets[stage]:
            bucket.weights.let_go(stage)

    def begin(self, instruction: Instruction) -> None:
        """Prepare for a computation on a stage."""
        if instruction.stage in self._units:
            self._units[instruction.stage].kind = instruction.kind
        for bucket in self._loose[instruction.stage]:
            bucket.weights.wait()
        if instruction.kind in MAKES_GRADIENTS:
            for bucket in self._buckets[instruction.stage]:
                # The last update may still read the memory of gradients of a unit that was not run.
                if bucket.is_renewed_late:
                    bucket.weights.wait()
        if self._has_offloaded and instruction.kind in _HALVES_OF_BACKWARD and instruction.stage in self._units:
            # A half of a backward visits units in another order.
            self._units[instruction.stage].enter_all()

    def end(self, stage: int) -> None:
        """Finish a computation on a stage."""
        if stage in self._units:
            self._units[stage].kind = None
            self._units[stage].leave_all()
            for bucket in self._loose[stage]:
                bucket.weights.let_go(stage)


def _goes(weights: Weights) -> bool:
    """Whether they are not here between the units that use them."""
    return weights.is_sharded or isinstance(weights, OffloadedWeights)


def _units_of(bucket: Bucket, users: Users) -> set[str]:
    """Return the units that a bucket is gathered for, or that wait for it; none if it is gathered for its stage."""
    every = [users.get(id(each), ()) for each in bucket.weights.parameters]
    # A parameter of several units is gathered once for their stage; but copied from the host, or waited for, for each.
    can_come = isinstance(bucket.weights, OffloadedWhole) or bucket.is_renewed_late
    if all(len(each) == 1 or (each and can_come) for each in every):
        return {unit for each in every for unit in each}
    return set()
