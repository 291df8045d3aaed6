"""One pass of a batch through the places: all forwards, and later, after the user's loss, all backwards.

    place 0     F0 F1 F2 F3                                B0 B1 B2 B3
    place 1        F0 F1 F2 F3    the user's loss    B0 B1 B2 B3

The instructions are those of the schedule, in its order: its forwards first, then its backwards. A transfer between two
places is an entry in the mail: values outside any graph, moved to the device where they are read.

A weight that several stages use is one parameter, owned by the first of them. The others have a copy of it for one
pass, or share its memory if they are on the same device, each with its own gradient. When all have finished, these
gradients are added to the owner's, in the order of the stages, so that the sum does not depend on timing.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.execution.interpreter import Interpreter
from shardwise.execution.threads import Mail, ThreadContext, run_together
from shardwise.placing.activation_offload import PlacedActivationOffload
from shardwise.placing.batch_rows import rows_of
from shardwise.placing.moving import CrossDeviceMode, moved
from shardwise.placing.places import Place
from shardwise.placing.rng_state import RngState
from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.outputs import Joint
from shardwise.stages.rows_apart import Counting, Returned, Way
from shardwise.stages.split.outline import leaves_of
from shardwise.stages.stage import Batch, Split, Stage, Values
from shardwise.states.tiers.streamed_gradients import give

_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B})


class _Microbatch(dict[str, Any]):
    """A microbatch that knows which one it is."""

    number = 0


@dataclass(kw_only=True)
class _PlacedStage:
    """A stage in one pass, with its own random numbers, and with copies of weights that other stages own."""

    inner: Stage
    stage: int
    place: Place
    copies: dict[Tensor, Tensor]
    rng: RngState | None
    meets: bool
    activations: PlacedActivationOffload | None
    #: Held during a forward, if it assigns attributes that those in other threads would find.
    turn: AbstractContextManager[Any]

    def __post_init__(self) -> None:
        self.parameters, self.buffers = self.inner.parameters, self.inner.buffers

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        """Compute on one microbatch: see `Stage.run`."""
        assert isinstance(batch, _Microbatch), "places are given numbered microbatches"
        with ExitStack() as stack:
            if self.activations is not None and torch.is_grad_enabled():
                stack.enter_context(self.activations.saving_at(self.place, self._there_anyway(values, batch)))
            if self.meets:
                stack.enter_context(CrossDeviceMode(self.place.device, self.copies))
            if self.rng is not None:
                stack.enter_context(self.rng.of(self.stage, batch.number, self.place.device))
            stack.enter_context(self.turn)
            return self.inner.run(values, batch)

    def _there_anyway(self, values: Values, batch: Batch) -> list[Tensor]:
        """Return tensors that are on the device whether this forward saves them or not."""
        given = [each for each in leaves_of(dict(batch)) if isinstance(each, Tensor)]
        weights = [*self.parameters.values(), *self.buffers.values(), *self.copies.values()]
        return [*weights, *values.values(), *given]


class MicrobatchPass:
    """One batch. After `forward` there is `joint`; `backward` is run at most once."""

    def __init__(
        self,
        schedule: Schedule,
        split: Split,
        places: Sequence[Place],
        microbatches: Sequence[Batch],
        *,
        num_threads: int,
        rng: RngState | None,
        activations: PlacedActivationOffload | None = None,
        counting: Counting | None = None,
    ) -> None:
        """`counting` counts the labels of microbatches, if that is wanted."""
        self.schedule, self.places, self._activations = schedule, places, activations
        self._rows = [rows_of(each) for each in microbatches]
        self._num_threads = num_threads
        self._copies = _copy_ties(schedule, split, places)
        several = len({place.device for place in places}) > 1
        ranks = schedule.placement.ranks
        turn = Lock() if split.assigns else nullcontext()
        stages = [
            _PlacedStage(
                inner=stage,
                stage=number,
                place=places[ranks[number]],
                copies=self._copies[number],
                rng=rng,
                meets=several or bool(self._copies[number]),
                activations=activations,
                turn=turn,
            )
            for number, stage in enumerate(split.stages)
            if stage is not None
        ]
        here = replace(split, stages=tuple(stages))
        self._interpreters = [Interpreter(rank, schedule, here, None) for rank in range(schedule.num_ranks)]
        self._counting = counting
        if counting is not None:
            for interpreter in self._interpreters:
                interpreter.counting = counting
        self._microbatches = microbatches
        self.joint: Joint | None = None

    def forward(self, ways: Mapping[int, Way]) -> Joint:
        """Run every forward of the schedule, and return what came out; `ways` are those of its numbers."""
        made = self.outputs()
        self.joint = Joint([each.output for each in made], self._rows, ways, [each.counted for each in made])
        return self.joint

    def outputs(self) -> list[Returned]:
        """Run every forward of the schedule, and return what came out of each microbatch."""
        self._run(_FORWARD)
        outputs = {number: each for one in self._interpreters for number, each in one.outputs.items()}
        counting = self._counting or Counting()
        for interpreter in self._interpreters:
            interpreter.outputs.clear()
        return [Returned(outputs[number], rows, counting.of(number)) for number, rows in enumerate(self._rows)]

    def backward(self, gradients: dict[int, Tensor]) -> None:
        """Run every backward of the schedule, from the gradients of the joined output's leaves."""
        assert self.joint is not None, "a backward comes after its forward"
        starts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._rows]
        for leaf, gradient in gradients.items():
            for number, start in enumerate(self.joint.starts(leaf, gradient)):
                if start is not None:
                    starts[number].append(start)
        self.joint = None
        last = self.schedule.placement.num_stages - 1
        interpreter = self._interpreters[self.schedule.placement.ranks[last]]
        for number, each in enumerate(starts):
            interpreter.start_backward(last, number, each)
        self._run(_BACKWARD)
        for copies in self._copies:
            add_gradients(copies)
        for interpreter in self._interpreters:
            interpreter.finish()

    def _run(self, kinds: frozenset[Kind]) -> None:
        mail = Mail()
        jobs = [(place.name, lambda rank=rank: self._walk(rank, kinds, mail)) for rank, place in enumerate(self.places)]
        run_together(jobs, mail, ThreadContext.here(self._num_threads))

    def _walk(self, rank: int, kinds: frozenset[Kind], mail: Mail) -> None:
        """Run the instructions of these kinds of a place, in its order."""
        interpreter, device = self._interpreters[rank], self.places[rank].device
        with _on(device):
            if kinds is _FORWARD:
                interpreter.take(0, [_numbered(each, number, device) for number, each in enumerate(self._microbatches)])
            expected: dict[tuple[int, int], list[Instruction]] = {}
            for instruction in self.schedule.orders[rank]:
                for part in instruction.parts:
                    if part.kind in kinds:
                        self._do(interpreter, part, mail, expected)

    def _do(
        self,
        interpreter: Interpreter,
        instruction: Instruction,
        mail: Mail,
        expected: dict[tuple[int, int], list[Instruction]],
    ) -> None:
        kind, stage, microbatch, peer, _ = instruction
        if kind in COMPUTE:
            for receive in expected.pop((stage, microbatch), []):
                interpreter.receiver(receive)(mail.collect((receive.peer, stage, microbatch)))
            interpreter.compute(instruction)
            if kind is Kind.I and self._activations is not None:
                self._activations.put_away(self.places[interpreter.rank])
        elif kind in SENDS:
            assert peer is not None, f"{instruction} names no peer"
            target = self.places[self.schedule.placement.ranks[peer]].device
            sent = interpreter.io.sender(instruction)()
            mail.post((stage, peer, microbatch), [_handed(each, target) for each in sent])
        elif kind in RECEIVES:
            # It runs beside computation: only its users wait for it.
            expected.setdefault((stage, microbatch), []).append(instruction)


def copies_for(parameters: Sequence[nn.Parameter], device: torch.device) -> dict[Tensor, Tensor]:
    """Return the replacement of each parameter on a device during one pass."""
    wants = torch.is_grad_enabled()
    return {each: each.detach().to(device).requires_grad_(wants and each.requires_grad) for each in parameters}


def add_gradients(copies: Mapping[Tensor, Tensor]) -> None:
    """Add the gradients of copies to their owners'."""
    with torch.no_grad():
        for owner, each in copies.items():
            if each.grad is not None:
                give(owner, each.grad.to(owner.device))
                each.grad = None


def _copy_ties(schedule: Schedule, split: Split, places: Sequence[Place]) -> list[dict[Tensor, Tensor]]:
    """Return, for each stage, copies of the weights that an earlier one owns."""
    owned: dict[int, list[nn.Parameter]] = {}
    for name, (owner, *others) in split.ties.items():
        holder = split.stages[owner]
        assert holder is not None, "all stages are in this process"
        for stage in others:
            owned.setdefault(stage, []).append(holder.parameters[name])
    ranks = schedule.placement.ranks
    return [copies_for(owned.get(stage, []), places[ranks[stage]].device) for stage in range(split.num_stages)]


def _numbered(microbatch: Batch, number: int, device: torch.device) -> _Microbatch:
    found = _Microbatch({name: moved(entry, device) for name, entry in microbatch.items()})
    found.number = number
    return found


def _handed(value: Tensor, device: torch.device) -> Tensor:
    """Return the same values on another device, detached; they require a gradient if the originals did."""
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
