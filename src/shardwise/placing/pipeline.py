"""Microbatches over places: a module in stages, and each call of it one pass, with the user's loss in the middle.

To autograd a pass is two nodes. One gives the outputs, and takes their gradients; the other runs the backwards:

    the user's loss <- outputs <- (one number on the CPU) <- backwards

Autograd runs a node in a thread that belongs to the device of what flows there. Backwards wait for all places, so they
must not hold up the thread of a GPU that a place needs: what flows there is a number on the CPU, and the thread is the
caller's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.errors import ShardwiseError
from shardwise.execution.pipeline import complete, forward_only, schedule_of
from shardwise.placing.activation_offload import PlacedActivationOffload
from shardwise.placing.batch_rows import cut_rows, home_of, inputs_with_gradient, rows_of
from shardwise.placing.microbatch_pass import MicrobatchPass
from shardwise.placing.places import Place, PlaceOptions
from shardwise.placing.rng_state import RngState
from shardwise.placing.told_outputs import ToldOutputs
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.stages.outputs import Joint
from shardwise.stages.rows_apart import Counting, Returned
from shardwise.stages.stage import Batch, Split


class Pipeline:
    """A module in stages over places."""

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        places: Sequence[Place],
        options: PlaceOptions,
        activations: PlacedActivationOffload | None = None,
    ) -> None:
        self.split, self.places, self._activations = split, places, activations
        self._module, self._options = module, options
        self._num_host = sum(place.device.type == "cpu" for place in places)
        self._schedules: dict[int, tuple[Schedule, Schedule]] = {}
        #: Whether stages draw random numbers, by the modes that their modules are in.
        self._draws: dict[tuple[Any, ...], bool] = {}
        self._told = ToldOutputs(module, self._outputs)

    def run(self, batch: Batch) -> Any:
        """Return the module's output for a batch; its backward runs on the places too."""
        given = inputs_with_gradient(batch) if torch.is_grad_enabled() else []
        trained = any(each.requires_grad for each in self._module.parameters())
        trains = torch.is_grad_enabled() and (trained or bool(given))
        microbatches = _cut(batch, min(self._options.microbatches, rows_of(batch)), given if trains else [])
        schedule, forwards = self._schedule(len(microbatches))
        modes = self._modes()
        ways = self._told.ways_of(batch, modes) if len(microbatches) > 1 else {}
        rng = RngState(trains=trains) if self._draws.get(modes, True) else None
        microbatch_pass = MicrobatchPass(
            schedule if trains else forwards,
            self.split,
            self.places,
            microbatches,
            num_threads=max(1, torch.get_num_threads() // max(1, self._num_host)),
            rng=rng,
            activations=self._activations,
            counting=Counting() if {"labels", "even"} & {*ways.values()} else None,
        )
        joint, home = microbatch_pass.forward(ways), home_of(batch)
        self._told.end()
        if rng is not None:
            self._draws[modes] = rng.have_drawn
            if not rng.have_drawn:
                rng.forget()
        if not trains:
            return joint.filled({number: joint.joined(number, home) for number in joint.tensors})
        return _InFlight(microbatch_pass, microbatches, {name: batch[name] for name in given}, home).output(joint)

    def _outputs(self, microbatches: Sequence[Batch], counting: Counting, rng: RngState) -> list[Returned]:
        """Return what comes out of microbatches, without gradients."""
        forwards = self._schedule(len(microbatches))[1]
        return MicrobatchPass(
            forwards, self.split, self.places, microbatches, num_threads=1, rng=rng, counting=counting
        ).outputs()

    def _schedule(self, count: int) -> tuple[Schedule, Schedule]:
        if count not in self._schedules:
            whole = complete(make_schedule(self._options, len(self.places), count), self.split)
            self._schedules[count] = whole, forward_only(whole)
        return self._schedules[count]

    def _modes(self) -> tuple[Any, ...]:
        """Return what determines whether modules draw: training mode, and the probabilities of dropouts."""
        return tuple((each.training, each.__dict__.get("p")) for each in self._module.modules())


def make_schedule(options: PlaceOptions, num_places: int, count: int) -> Schedule:
    """Return the schedule for this many microbatches, compute only. Refuse those that hold the weights twice."""
    schedule = schedule_of(Plan(pp=num_places, microbatches=count, schedule=options.schedule, chunks=options.chunks))
    if len(schedule.placement.pipes) > 1 or schedule.staleness:
        raise ShardwiseError(
            f"{options.schedule} holds the weights twice, and a placed module has one of each",
            remedy='schedule="zb-v"',
        )
    return schedule


@dataclass(slots=True, eq=False)
class _InFlight:
    """A pass between its forward and its backward, as autograd's two nodes see it."""

    microbatch_pass: MicrobatchPass | None
    microbatches: Sequence[Batch]
    inputs: dict[str, Tensor]
    home: torch.device
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def output(self, joint: Joint) -> Any:
        """Return the joined output, in autograd's graph."""
        anchor = torch.zeros((), requires_grad=True)
        trigger = _Backwards.apply(self, anchor, *self.inputs.values())  # type: ignore[no-untyped-call]
        numbers = joint.differentiable
        tensors = {number: joint.joined(number, self.home) for number in joint.tensors if number not in numbers}
        if numbers:
            found = _Outputs.apply(self, joint, numbers, trigger)  # type: ignore[no-untyped-call]
            tensors.update(zip(numbers, found, strict=True))
        return joint.filled(tensors)

    def backward(self) -> list[Tensor]:
        """Run the backwards, and return the gradients of the inputs that require one."""
        if self.microbatch_pass is None:
            raise ShardwiseError(
                "the backward of this forward has been run, and nothing was kept for a second one",
                remedy="(first_loss + second_loss).backward(), once for each forward; microbatches=1 for gradients of"
                " gradients (create_graph=True)",
            )
        microbatch_pass, self.microbatch_pass = self.microbatch_pass, None
        gradients, self.gradients = self.gradients, {}
        microbatch_pass.backward(gradients)
        return [self._gradient(name, each) for name, each in self.inputs.items()]

    def _gradient(self, name: str, whole: Tensor) -> Tensor:
        leaves = [each[name] for each in self.microbatches]
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        is_cut = leaves[0].shape != whole.shape or len(leaves) == 1
        return torch.cat(found) if is_cut else torch.stack(found).sum(0)


class _Backwards(torch.autograd.Function):
    """Its backward is that of all places."""

    @staticmethod
    def forward(ctx: Any, flight: _InFlight, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.flight = flight
        del inputs
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.flight.backward())


class _Outputs(torch.autograd.Function):
    """The outputs of all microbatches, joined."""

    @staticmethod
    def forward(ctx: Any, flight: _InFlight, joint: Joint, numbers: list[int], trigger: Tensor) -> tuple[Tensor, ...]:
        del trigger
        ctx.flight, ctx.numbers = flight, numbers
        ctx.set_materialize_grads(False)
        return tuple(joint.joined(number, flight.home) for number in numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.numbers, gradients, strict=True)
        ctx.flight.gradients = {number: each for number, each in pairs if each is not None}
        return None, None, None, torch.ones(())


def _cut(batch: Batch, count: int, wanted: Sequence[str]) -> list[Batch]:
    """Return the microbatches. Each has its own leaf of entries that require a gradient."""
    return [
        {name: each.detach().requires_grad_() if name in wanted else each for name, each in microbatch.items()}
        for microbatch in cut_rows(batch, count)
    ]
