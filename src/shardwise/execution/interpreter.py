"""One rank: its stages, the values that it holds, and the effect of each instruction on them.

An executor decides when an instruction may run; the interpreter decides what it does. Both executors use this
interpreter, so an instruction means the same in one process and in many.
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
from shardwise.execution.backward import Halves, find_halves, forget_hooks, full_backward, input_gradients
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
    """Moves activations saved by forwards off the device and back."""

    def saving(
        self, stays: Iterable[Tensor], kept: Kept | None, name: Hashable | None = None
    ) -> AbstractContextManager[Any]:
        """Enter this around a forward. `stays` are tensors that stay on the device anyway; `kept` counts the rest."""
        ...

    def offload(self, name: Hashable) -> None:
        """OFFLOAD: move the activations saved by a forward off the device."""
        ...

    def reload(self, name: Hashable) -> None:
        """RELOAD: bring the activations of a forward back, because its backward is near."""
        ...

    def put_away(self, name: Hashable | None = None) -> None:
        """Let activations that the first half of a backward brought back leave the device again."""
        ...


class StageStates(Protocol):
    """Work beside the computation of a rank for data parallelism; implemented in `states/data_parallel.py`.

    `begin` and `end` are called around every computation on a stage. For an instruction that pairs two computations,
    both `begin` calls come before the two and both `end` calls after them.
    """

    def gather(self, instruction: Instruction) -> None: ...

    def release(self, instruction: Instruction) -> None: ...

    def reduce(self, instruction: Instruction) -> None: ...

    def begin(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None: ...


@dataclass(slots=True)
class _Saved:
    """State that a forward leaves for its backward. If `rng` is set, outputs and loss are recomputed from inputs."""

    inputs: Values
    outputs: Values = field(default_factory=dict)
    loss: Tensor | None = None
    rng: RngState | None = None
    #: The context of that recomputation: it returns results that were kept (selective recomputation).
    kept: AbstractContextManager[Any] = field(default_factory=nullcontext)
    #: Where the backward of a last stage starts without a loss: output tensors with their gradients.
    starts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wants_gradient: Container[str] = ()
    #: Where an I will cut the graph, found ahead of time, with the outputs and inputs it was found from.
    foreseen: "tuple[list[Tensor], list[Tensor], Halves] | None" = None
    #: The second half of the backward, which W will run.
    halves: Halves | None = None


#: The values that a stage made for other stages; and the loss, if it is a last stage.
_Made = tuple[Values, Measured | None]


class Interpreter:
    """Runs the instructions of one rank. `schedule` and `split` are those of the whole pipeline. Without a loss, the
    module's outputs are kept in `outputs`, and the caller sets where backwards start (`start_backward`)."""

    def __init__(
        self, rank: int, schedule: Schedule, split: Split, loss: Loss | None, policy: ComputePolicy | None = None
    ) -> None:
        self.rank, self.schedule, self.split, self.loss = rank, schedule, split, loss
        self.policy = policy or ComputePolicy()
        here = schedule.placement.stages[rank]
        self._stages = {stage: found for stage in here if (found := split.stages[stage % split.num_stages]) is not None}
        self._lasts = {stage for stage in here if stage % split.num_stages == split.num_stages - 1}
        mine = [part for each in schedule.orders[rank] for part in each.parts]
        #: The losses measured on this rank.
        self.losses = StepLosses(mine, set() if loss is None else self._lasts, schedule.num_steps)
        # A forward-only schedule saves nothing for a backward.
        self._trains = any(part.kind in BACKWARD for part in mine)
        self._saved: dict[tuple[int, int], _Saved] = {}
        #: Values and gradients in transit to and from the stages of this rank.
        self.io = StageIO(rank, schedule.placement, split)
        self._microbatches: dict[int, Batch] = {}
        #: The module's output for each microbatch, if there is no loss; and the context that it is computed in.
        self.outputs: dict[int, Any] = {}
        self.counting: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext()
        #: Called with a step before its weights are used, if there are several versions of them.
        self.select_weights: Callable[[int], None] | None = None
        #: Called with a microbatch and a stage before the stage runs, if dropout masks depend on the rows in it.
        self.select_rows: Callable[[Batch, int], None] | None = None
        #: Saves how often dropouts were called and returns what restores it: a recomputed layer draws the same masks.
        self.keep_calls: Callable[[], Callable[[], None]] | None = None
        #: Bytes that a forward of each stage keeps. If this is set, stages missing from it are counted.
        self.kept_bytes: KeptBytes | None = None
        #: Takes saved activations off the device, if the plan offloads them.
        self.offload: ActivationOffload | None = None
        #: The slots (dictionary and key) of module buffers that forwards write to.
        self.written: Sequence[tuple[dict[str, Any], str]] = ()
        #: Computes further metrics from the module's output.
        self.observe: Callable[[Any, Batch], Pairs] | None = None
        #: Called with each computation before it is run.
        self.before: Callable[[Instruction], None] | None = None
        #: Called after a forward was recomputed, with the rank, the backward that needed it, start and end.
        self.note_again: Callable[[int, Instruction, float, float], None] | None = None
        self._now: Instruction | None = None  # The computation that is running.
        self._handlers: dict[Kind, Callable[[Instruction], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
        }

    def begin(self) -> None:
        """Start with no state, also none of a step that an error interrupted."""
        self.io.clear()
        for held in (self._saved, self._microbatches, self.losses, self.outputs):
            held.clear()

    def take(self, step: int, microbatches: list[Batch]) -> None:
        """Take the batch of a step as microbatches."""
        first = step * self.schedule.num_microbatches
        self._microbatches.update(enumerate(microbatches, first))
        self.losses.begin(step)

    def finish(self) -> None:
        """End a step, asserting that every forward has had its backward and every value its reader."""
        left = [*self._saved, *self.io.left]
        assert not left, f"rank {self.rank} has ended its step and still holds {left}"
        self._microbatches.clear()

    def compute(self, instruction: Instruction) -> None:
        """Run a forward or a backward, or both computations of a pair."""
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
        """Do the part of a computation that needs no received value: find where an I will cut its graph."""
        for part in instruction.parts:
            saved = self._saved.get((part.stage, part.microbatch)) if part.kind is Kind.I else None
            if saved is not None and saved.rng is None:
                outputs = [each for each in (saved.loss, *saved.outputs.values()) if each is not None]
                wanted = [each for each in outputs if each.requires_grad]
                if wanted:
                    leaves = _leaves(saved)
                    saved.foreseen = wanted, leaves, find_halves(wanted, leaves)

    def receiver(self, receive: Instruction) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that stores the tensors of a RECV; they are outside any graph."""
        saved, key = self._saved, (receive.stage, receive.microbatch)
        return self.io.receiver(receive, lambda: saved[key].wants_gradient)

    def start_backward(self, stage: int, microbatch: int, starts: list[tuple[Tensor, Tensor]]) -> None:
        """Start the backward of a last stage at these tensors of its output, with these gradients."""
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
        """Return tensors that are on the device whether a forward saves them or not."""
        here = self._stages[stage]
        return [*here.parameters.values(), *here.buffers.values(), *tensors_in(self._microbatches[microbatch])]

    def _saving(self, stage: int, microbatch: int, inputs: Values, kept: Kept | None) -> AbstractContextManager[Any]:
        """Return the context of a forward that offloads the tensors it saves, or counts their bytes, as required."""
        if self.offload is not None and self._trains:
            stays = [*self._there_anyway(stage, microbatch), *inputs.values()]
            return self.offload.saving(stays, kept, (stage, microbatch))
        return nullcontext() if kept is None else kept.counting()

    def _replayed(self, stage: int, microbatch: int, kept: Kept | None) -> AbstractContextManager[Any]:
        """Return the context of a forward that records the state each layer needs for its recomputation, if any."""
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
        """Select the weights and rows of a microbatch before a stage runs."""
        if self.select_weights is not None:
            self.select_weights(self.schedule.step_of(microbatch))
        if self.select_rows is not None:
            self.select_rows(self._microbatches[microbatch], stage % self.split.num_stages)

    def _run(self, stage: int, microbatch: int, inputs: Values, *, is_again: bool = False) -> _Made:
        """Run a stage on its inputs and return its outputs; and the loss, if it is the last stage."""
        batch = self._microbatches[microbatch]
        self._select(stage, microbatch)
        weighed = self.loss if stage in self._lasts and isinstance(self.loss, WeighedLoss) else None
        with (
            nullcontext() if self.policy.autocast is None else self.policy.precision(home_of(batch)),
            nullcontext() if weighed is None else weighed.watching(),
            self.counting(microbatch) if stage in self._lasts else nullcontext(),
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
        """Return the outputs that a backward starts from, their gradients, and the state that the forward saved."""
        _, stage, microbatch, _, _ = instruction
        saved = self._saved[stage, microbatch]
        # The module's own checkpoints are recomputed in the backward: they need the same weights and masks.
        self._select(stage, microbatch)
        if saved.rng is not None:
            begun = perf_counter()
            forget_hooks(saved.inputs)
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
            # If a gradient did not arrive, the backward starts from fewer outputs than `prepare` assumed.
            if len(foreseen) != len(outputs) or not all(map(is_, foreseen, outputs)):
                leaves, halves = _leaves(saved), None
            saved.halves = input_gradients(outputs, gradients, leaves, halves)
        self.io.pass_back(instruction.stage, instruction.microbatch, saved.inputs)
        if self.offload is not None:
            self.offload.put_away((instruction.stage, instruction.microbatch))
        # Drop all references to the graph except those that W needs.
        saved.inputs, saved.outputs, saved.loss, saved.foreseen, saved.starts = {}, {}, None, None, []

    def _weight_gradient(self, instruction: Instruction) -> None:
        saved = self._saved.pop((instruction.stage, instruction.microbatch))
        if saved.halves is not None:
            self._select(instruction.stage, instruction.microbatch)
            saved.halves.run()


def _leaves(saved: _Saved) -> list[Tensor]:
    """Return the inputs that require a gradient."""
    return [leaf for leaf in saved.inputs.values() if leaf.requires_grad]
