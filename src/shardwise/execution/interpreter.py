"""One rank: its stages, the values that it holds, and what each instruction does with them.

An executor decides when an instruction may run; this decides what running it means. Both executors use this one, so an
instruction means the same in one process and in many.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.execution.backward import Halves, find_halves, full_backward, input_gradients
from shardwise.execution.compute_policy import ComputePolicy, RngState, saving_nothing
from shardwise.execution.replay import replayed
from shardwise.execution.stage_io import StageIO
from shardwise.execution.step_losses import Measured, StepLosses, measure
from shardwise.schedule.instruction import BACKWARD, Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.activation_bytes import Kept, KeptBytes
from shardwise.stages.batch import home_of
from shardwise.stages.losses import WeighedLoss
from shardwise.stages.metrics import Pairs
from shardwise.stages.recalled import recalling
from shardwise.stages.rows import tensors_in
from shardwise.stages.stage import Batch, Loss, Split, Values


class ActivationOffload(Protocol):
    """Where forwards put what they save, if not all of it stays on the device."""

    def saving(
        self, stays: Iterable[Tensor], kept: Kept | None, name: Hashable | None = None
    ) -> AbstractContextManager[Any]:
        """Around a forward. `stays` is on the device anyway; what is kept there is told to `kept`."""
        ...

    def offload(self, name: Hashable) -> None:
        """OFFLOAD: what a forward has saved is to leave the device."""
        ...

    def reload(self, name: Hashable) -> None:
        """RELOAD: its backward is near."""
        ...

    def put_away(self, name: Hashable | None = None) -> None:
        """A half of a backward is over: what it has brought back may leave again."""
        ...


class StageStates(Protocol):
    """What goes on beside the computation of a rank, for its replicas: `states/data_parallel.py`.

    `begin` and `end` stand around every computation on a stage; a pair of two has both around both.
    """

    def gather(self, instruction: Instruction) -> None: ...

    def release(self, instruction: Instruction) -> None: ...

    def reduce(self, instruction: Instruction) -> None: ...

    def begin(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None: ...


@dataclass(slots=True)
class _Saved:
    """What a forward leaves for its backward. With `rng`, outputs and loss are to be made again from inputs."""

    inputs: Values
    outputs: Values = field(default_factory=dict)
    loss: Tensor | None = None
    rng: RngState | None = None
    #: What to enter when they are: what of it is not computed but was kept.
    kept: AbstractContextManager[Any] = field(default_factory=nullcontext)
    #: Where the backward of a last stage begins if not at its loss: tensors of the output, and their gradients.
    starts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wants_gradient: Container[str] = ()
    #: Where an I will cut the graph, with the outputs and inputs that it was found from.
    foreseen: "tuple[list[Tensor], list[Tensor], Halves] | None" = None
    #: What W is left to do.
    halves: Halves | None = None


#: What a stage has made for others; and the loss, of a last one.
_Made = tuple[Values, Measured | None]


class Interpreter:
    """Runs the instructions of one rank. `schedule` and `split` are those of the whole pipeline.

    Without a loss the module's outputs are kept in `outputs`, and somebody else says where backwards start.
    """

    def __init__(
        self, rank: int, schedule: Schedule, split: Split, loss: Loss | None, policy: ComputePolicy | None = None
    ) -> None:
        self.rank, self.schedule, self.split, self.loss = rank, schedule, split, loss
        self.policy = policy or ComputePolicy()
        here = schedule.placement.stages[rank]
        self._stages = {stage: found for stage in here if (found := split.stages[stage % split.num_stages]) is not None}
        self._lasts = {stage for stage in here if stage % split.num_stages == split.num_stages - 1}
        mine = [part for each in schedule.orders[rank] for part in each.parts]
        #: What is measured here.
        self.losses = StepLosses(mine, set() if loss is None else self._lasts, schedule.num_steps)
        # A schedule of forwards alone leaves nothing to come back for.
        self._trains = any(part.kind in BACKWARD for part in mine)
        self._saved: dict[tuple[int, int], _Saved] = {}
        #: What is on its way from and to the stages of this rank.
        self.io = StageIO(rank, schedule.placement, split)
        self._microbatches: dict[int, Batch] = {}
        #: What the module returned for each microbatch, where there is no loss.
        self.outputs: dict[int, Any] = {}
        #: Called with a step before its weights are used, where there are several versions of them.
        self.select_weights: Callable[[int], None] | None = None
        #: Called with a microbatch and a stage before that is run, where masks depend on which rows it has.
        self.select_rows: Callable[[Batch, int], None] | None = None
        #: What has calls of dropouts counted on from here, as a layer will count them that is run again.
        self.keep_calls: Callable[[], Callable[[], None]] | None = None
        #: What forwards keep: of stages that are not in it yet it is counted, where somebody asks.
        self.kept_bytes: KeptBytes | None = None
        #: Where forwards put what they save, if not all of it stays on the device.
        self.offload: ActivationOffload | None = None
        #: Where the modules keep buffers that forwards write.
        self.written: Sequence[tuple[dict[str, Any], str]] = ()
        #: What else is measured of the module's output.
        self.observe: Callable[[Any, Batch], Pairs] | None = None
        #: Called with each computation before it is run.
        self.before: Callable[[Instruction], None] | None = None
        #: Called when a forward was made again: rank, the backward that it was for, and when.
        self.note_again: Callable[[int, Instruction, float, float], None] | None = None
        #: What is being run.
        self._now: Instruction | None = None
        self._handlers: dict[Kind, Callable[[Instruction], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
        }

    def begin(self) -> None:
        """Start anew. Of what was broken off by an error nothing is left."""
        self.io.clear()
        for held in (self._saved, self._microbatches, self.losses, self.outputs):
            held.clear()

    def take(self, step: int, microbatches: list[Batch]) -> None:
        """Take the batch of a step, in microbatches."""
        first = step * self.schedule.num_microbatches
        self._microbatches.update(enumerate(microbatches, first))
        self.losses.begin(step)

    def finish(self) -> None:
        """End: all that was begun has been run."""
        left = [*self._saved, *self.io.left]
        assert not left, f"rank {self.rank} has ended its step and still holds {left}"
        self._microbatches.clear()

    def compute(self, instruction: Instruction) -> None:
        """Run a forward or a backward, or both halves of a pair."""
        for part in (instruction,) if instruction.beside is None else instruction.parts:
            try:
                if self.before is not None:
                    self.before(part)
                self._now = part
                self._handlers[part.kind](part)
            except Exception as error:
                error.add_note(f"in {part}: stage {part.stage}, microbatch {part.microbatch}, rank {self.rank}")
                raise

    def move(self, instruction: Instruction) -> None:
        """Run an OFFLOAD or a RELOAD."""
        if self.offload is None:
            raise ShardwiseError(
                f"{instruction} moves activations, and nothing is there that takes them to the host",
                remedy="offload.activations in the plan, or a schedule without it",
            )
        name = (instruction.stage, instruction.microbatch)
        (self.offload.offload if instruction.kind is Kind.OFFLOAD else self.offload.reload)(name)

    def prepare(self, instruction: Instruction) -> None:
        """Do what can be done of a computation before what it waits for is there."""
        for part in instruction.parts:
            saved = self._saved.get((part.stage, part.microbatch)) if part.kind is Kind.I else None
            if saved is not None and saved.rng is None:
                outputs = [each for each in (saved.loss, *saved.outputs.values()) if each is not None]
                wanted = [each for each in outputs if each.requires_grad]
                if wanted:
                    leaves = _leaves(saved)
                    saved.foreseen = wanted, leaves, find_halves(wanted, leaves)

    def receiver(self, receive: Instruction) -> Callable[[Sequence[Tensor]], None]:
        """What takes in what a RECV has received: tensors outside any graph."""
        saved, key = self._saved, (receive.stage, receive.microbatch)
        return self.io.receiver(receive, lambda: saved[key].wants_gradient)

    def start_backward(self, stage: int, microbatch: int, starts: list[tuple[Tensor, Tensor]]) -> None:
        """Let the backward of a last stage begin at these tensors of its output, with these gradients."""
        self._saved[stage, microbatch].starts = starts

    def _forward(self, instruction: Instruction) -> None:
        _, stage, microbatch, _, _ = instruction
        inputs = self.io.take_values(stage, microbatch)
        saved = _Saved(inputs=inputs)
        counts = self.kept_bytes is not None and stage not in self.kept_bytes
        kept = Kept(self._there_anyway(stage, microbatch)) if counts else None
        if self._trains and self.policy.recompute == "stage":
            saved.rng = RngState.now(
                chain(inputs.values(), tensors_in(self._microbatches[microbatch])), chain(self.written, self.split.left)
            )
            first, saved.kept = recalling(kept) if self.policy.selective else (nullcontext(), nullcontext())
            with first, saving_nothing():
                made, measured = self._run(stage, microbatch, inputs)
            if kept is not None:
                kept.add(inputs.values())
        else:
            with self._saving(stage, microbatch, inputs, kept), self._replayed(stage, microbatch, kept):
                made, measured = self._run(stage, microbatch, inputs)
            saved.outputs, saved.loss = made, None if measured is None else measured.total
        if kept is not None and self.kept_bytes is not None:
            self.kept_bytes[stage] = kept.num_bytes
        if measured is not None:
            self.losses.add(self.schedule.step_of(microbatch), measured)
        if self._trains:
            saved.wants_gradient = {name for name, value in made.items() if value.requires_grad}
            self._saved[stage, microbatch] = saved
        self.io.deliver(stage, microbatch, made)

    def _there_anyway(self, stage: int, microbatch: int) -> list[Tensor]:
        """What is on the device whether a forward saves it or not."""
        here = self._stages[stage]
        return [*here.parameters.values(), *here.buffers.values(), *tensors_in(self._microbatches[microbatch])]

    def _saving(self, stage: int, microbatch: int, inputs: Values, kept: Kept | None) -> AbstractContextManager[Any]:
        """Around a forward whose backward is to come: where what it saves goes, and who counts it."""
        if self.offload is not None and self._trains:
            stays = [*self._there_anyway(stage, microbatch), *inputs.values()]
            return self.offload.saving(stays, kept, (stage, microbatch))
        return nullcontext() if kept is None else kept.counting()

    def _replayed(self, stage: int, microbatch: int, kept: Kept | None) -> AbstractContextManager[Any]:
        """Around a forward: where it is taken down how its layers are recomputed, if they are."""
        if not self._trains or self.policy.recompute != "layers":
            return nullcontext()
        return replayed(
            self._stages[stage], self._microbatches[microbatch], written=self.written,
            left=self.split.left, kept=kept,
            select=partial(self._select, stage, microbatch), keep=self.keep_calls, note=self._note_again,
        )  # fmt: skip

    def _note_again(self, begun: float, ended: float) -> None:
        if self.note_again is not None and self._now is not None:
            self.note_again(self.rank, self._now, begun, ended)

    def _select(self, stage: int, microbatch: int) -> None:
        """Have what depends on the microbatch be its own."""
        if self.select_weights is not None:
            self.select_weights(self.schedule.step_of(microbatch))
        if self.select_rows is not None:
            self.select_rows(self._microbatches[microbatch], stage % self.split.num_stages)

    def _run(self, stage: int, microbatch: int, inputs: Values, *, is_again: bool = False) -> _Made:
        """What a stage makes of its inputs; and the loss, if it is the last."""
        batch = self._microbatches[microbatch]
        self._select(stage, microbatch)
        weighed = self.loss if stage in self._lasts and isinstance(self.loss, WeighedLoss) else None
        with (
            nullcontext() if self.policy.autocast is None else self.policy.precision(home_of(batch)),
            nullcontext() if weighed is None else weighed.watching(),
        ):
            made, output = self._stages[stage].run(inputs, batch)
            if stage not in self._lasts:
                return made, None
            if self.loss is None:
                self.outputs[microbatch] = output
                return made, None
            observed = {} if self.observe is None or is_again else self.observe(output, batch)
            measured = measure(self.loss, output, batch, stage, microbatch, observed)
        if self._trains and not measured.total.requires_grad:
            raise ShardwiseError(
                "the loss does not depend on any parameter that requires a gradient, so there is nothing to train",
                remedy="compute it from the module's output, without detach() or no_grad()",
            )
        return made, measured

    def _sources(self, instruction: Instruction) -> tuple[list[Tensor], list[Tensor | None], _Saved]:
        """What a backward starts from: the outputs that need gradients, and those gradients."""
        _, stage, microbatch, _, _ = instruction
        saved = self._saved[stage, microbatch]
        # What the module checkpoints itself is run again in the backward: with its weights and its masks.
        self._select(stage, microbatch)
        if saved.rng is not None:
            begun = perf_counter()
            with saved.rng.again(self._stages[stage].buffers.values()), saved.kept:
                saved.outputs, measured = self._run(stage, microbatch, saved.inputs, is_again=True)
            saved.loss = None if measured is None else measured.total
            self._note_again(begun, perf_counter())
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if saved.loss is not None and saved.loss.requires_grad:
            outputs.append(saved.loss)
            gradients.append(None)
        for start, gradient in saved.starts:
            outputs.append(start)
            gradients.append(gradient)
        for name, tensor in saved.outputs.items():
            arrived = self.io.take_gradients(stage, microbatch, name)
            if arrived and tensor.requires_grad:
                outputs.append(tensor)
                gradients.append(sum(arrived[1:], arrived[0]))
        return outputs, gradients, saved

    def _backward(self, instruction: Instruction) -> None:
        outputs, gradients, saved = self._sources(instruction)
        if outputs:
            full_backward(outputs, gradients)
        self.io.pass_back(instruction.stage, instruction.microbatch, saved.inputs)
        del self._saved[instruction.stage, instruction.microbatch]

    def _input_gradient(self, instruction: Instruction) -> None:
        outputs, gradients, saved = self._sources(instruction)
        if outputs:
            foreseen, leaves, halves = saved.foreseen or ([], [], None)
            # A gradient that did not come leaves another graph than was foreseen.
            if len(foreseen) != len(outputs) or not all(map(is_, foreseen, outputs)):
                leaves, halves = _leaves(saved), None
            saved.halves = input_gradients(outputs, gradients, leaves, halves)
        self.io.pass_back(instruction.stage, instruction.microbatch, saved.inputs)
        if self.offload is not None:
            self.offload.put_away((instruction.stage, instruction.microbatch))
        # The graph lives on in what W still needs of it, and nowhere else.
        saved.inputs, saved.outputs, saved.loss, saved.foreseen, saved.starts = {}, {}, None, None, []

    def _weight_gradient(self, instruction: Instruction) -> None:
        saved = self._saved.pop((instruction.stage, instruction.microbatch))
        if saved.halves is not None:
            self._select(instruction.stage, instruction.microbatch)
            saved.halves.run()


def _leaves(saved: _Saved) -> list[Tensor]:
    """What was read and wants a gradient."""
    return [leaf for leaf in saved.inputs.values() if leaf.requires_grad]
