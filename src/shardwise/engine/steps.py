"""Training steps, evaluations and predictions: cut the batch, run the schedule, reduce gradients, update."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

from shardwise.engine.make_execution import Execution
from shardwise.engine.make_states import States
from shardwise.engine.metrics import MetricSum
from shardwise.engine.parts import Parts
from shardwise.engine.predictions import Predictions
from shardwise.engine.step_graphs import StepGraphs
from shardwise.engine.unchanged import Unchanged, UnchangedGroups, UnchangedHooks
from shardwise.engine.update import LaunchedStep, StepNumbers
from shardwise.execution.collector import StreamCollector
from shardwise.execution.executor import Executor, Record
from shardwise.execution.step_losses import Tally
from shardwise.kernels.lazy_logits import before_a_loss
from shardwise.stages.batch import shapes_of
from shardwise.stages.metrics import Metrics
from shardwise.stages.stage import Batch


class Steps:
    """The steps of one engine. `num_begun` is the number of training steps begun."""

    def __init__(self, parts: Parts, execution: Execution, states: States) -> None:
        self._module, self._sharded, self._wires = parts.module, parts.sharded, parts.wires
        self._execution, self._states = execution, states
        self._unchanged, self.metrics = Unchanged(parts.module), MetricSum(parts)
        self._hooks, self._settings = UnchangedHooks(parts), parts.settings
        self._end_settings()
        self._groups = UnchangedGroups(states.parameters, states.data.updates, is_all=parts.plan.pp == 1)
        self._predictions = Predictions(parts, execution)
        self.graphs = StepGraphs(parts, states, execution.dropouts)
        self.num_begun, self._is_first = 0, True
        #: The context of evaluations. Set later.
        self.in_evaluation_mode: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Whether stages may send different shapes for batches of the same shapes.
        self._shapes_by_data = parts.split.shapes_by_data

    def train(
        self, batch: Batch, update: Callable[[Tally], None] | None = None,
        *, metrics: Metrics | None = None, trace: bool = False, data_wait: float = 0.0,
        streams: StreamCollector | None = None, is_plain: bool = False,
    ) -> Tally:  # fmt: skip
        """Take one step and return its loss; with `trace`, record it. `update` replaces the default, waiting update.

        `is_plain`: run without a captured CUDA graph."""
        begin, execution, states = perf_counter(), self._execution, self._states
        recording = execution.recorder.start() if trace else None
        record = None if recording is None else recording.note
        self._wires.check_before()
        with self._wires.told_to_all(), self._in_step():
            self._unchanged.check()
            self._hooks.check()
            self._groups.check()
            self._check_settings(batch)
            execution.batches.first.note(batch, self.num_begun, self._whole_state, is_timed=trace)
            if execution.batches.outside is not None:
                execution.batches.outside.begin()
            states.begin_step()
            microbatches, signature = execution.batches.cut(batch), ("train", shapes_of(batch))
            if execution.dropouts is not None:
                place = execution.batches.place(microbatches[0], self.num_begun)
                execution.dropouts.take(microbatches, place)
            self.num_begun += 1
            with execution.recorder.listening(recording, signature):
                with states.written.shared(), self.metrics.of(execution.trainer, metrics):
                    compute = partial(self._run, execution.trainer, signature=signature, record=record)
                    is_plain = is_plain or record is not None or metrics is not None
                    with self._sharded.explained(self._module, microbatches[0]):
                        tally = compute(microbatches) if is_plain else self.graphs.run(microbatches, compute)
                start = perf_counter()
                if states.stream is None:
                    states.data.finish()
                execution.batches.same.check_told()
                execution.batches.first.check(tally, states.module.gradients)
                if states.stream is None:
                    (update or states.update.take)(tally)
                if execution.batches.outside is not None:
                    execution.batches.outside.end()
                self._groups.end()
                self._end_settings()
                execution.batches.first.begin()
                end, self._is_first = perf_counter(), False
        if recording is not None:
            execution.recorder.end(
                recording, signature, step=(start, end), begin=begin, data_wait=data_wait, streams=streams
            )
        return tally

    def _in_step(self) -> AbstractContextManager[None]:
        return self._wires.in_step(is_first=self._is_first)

    def _whole_state(self) -> Mapping[str, Any]:
        self._states.flush()
        return self._states.module.whole()

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launch a step whose numbers can be read later; if the host must wait for its device, it is over on return."""
        update, optimizers = self._states.device_update, self._states.data.updates.optimizers
        if update is None or not all(optimizer.state for optimizer in optimizers):
            tally, taken = self.train(batch), self._states.update
            return LaunchedStep(StepNumbers(tally.mean, taken.gradient_norm, taken.was_finite))
        self.train(batch, update.take)
        return update.launched

    def evaluate(self, batch: Batch, metrics: Metrics | None = None) -> Tally:
        """Return the loss of a batch, with every submodule in evaluation mode meanwhile."""
        evaluator = self._execution.evaluator
        with self._wires.told_to_all(), self._in_step():
            self._check_settings(batch, evaluates=True)
        with self._in_evaluation_mode(), self.metrics.of(evaluator, metrics):
            microbatches = self._execution.batches.cut(batch, "evaluation")
            with before_a_loss():
                tally = self._run(evaluator, microbatches, ("evaluate", shapes_of(batch)), None)
            self._execution.batches.same.check_told()
            return tally

    def _check_settings(self, batch: Batch, *, evaluates: bool = False) -> None:
        if self._settings is not None:
            self._settings.check(batch)
            if evaluates:
                self._settings.check_evaluation(batch)

    def _end_settings(self) -> None:
        if self._settings is not None:
            self._settings.end()

    def predict(self, batch: Batch) -> Any:
        """Return the module's output for a batch in evaluation mode."""
        if self._settings is not None:
            self._settings.note()
            with self._in_step():
                self._settings.check_evaluation(batch)
        with self._in_evaluation_mode():
            found = self._predictions.run(batch, shapes_by_data=self._shapes_by_data)
            self._sharded.check_attention(self._module, self._wires)
            return found

    @contextmanager
    def _in_evaluation_mode(self) -> Iterator[None]:
        try:
            with (
                self.in_evaluation_mode(), self._wires.told_to_all(), self._in_step(), self._states.written.shared(),
                self._sharded.evaluating(self._module),
            ):  # fmt: skip
                yield
        finally:
            self._is_first = False
            self._end_settings()

    def _run(self, executor: Executor, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        """Run a step or an evaluation, and return the loss of the whole batch."""
        if self._states.stream is not None and executor is self._execution.trainer:
            tally = self._states.stream.train_step(microbatches, signature, record)
        else:
            agreed = None if self._shapes_by_data else signature
            tally = self._execution.losses.of(executor.run(microbatches, signature=agreed, record=record))
        self._sharded.check_attention(self._module, self._wires)
        return tally
