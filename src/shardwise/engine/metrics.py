"""Metrics of the whole batch, from those that each process measured on its microbatches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.parts import Parts
from shardwise.errors import ShardwiseError
from shardwise.execution.executor import Executor
from shardwise.stages.batch import Padding, length_of
from shardwise.stages.metrics import Metrics, Pairs, pairs_of
from shardwise.stages.stage import Batch


class MetricSum:
    """The metrics of the last step or evaluation: those that the loss returns, and those of a separate function.

    All processes know whether there are any, from the example and from the function. Only last stages know which.
    """

    def __init__(self, parts: Parts) -> None:
        self._wires, self._cp, self._pads = parts.wires, parts.plan.cp, parts.options.pad
        #: Whether the loss returned metrics for the example.
        self._of_loss = parts.has_metrics
        self._asked = False
        self._measured: list[Pairs] = []

    @contextmanager
    def of(self, executor: Executor, metrics: Metrics | None) -> Iterator[None]:
        """Collect the metrics of the step or evaluation inside this context. `metrics` is called with every output."""
        self._measured, self._asked = [], metrics is not None
        for interpreter in executor.interpreters:
            interpreter.observe = None if metrics is None else self._observer(metrics)
        try:
            yield
        finally:
            for interpreter in executor.interpreters:
                interpreter.observe = None
        self._measured = [each for interpreter in executor.interpreters for each in interpreter.losses.metrics]
        if not (self._of_loss or self._asked):
            if any(self._measured):
                raise ShardwiseError(
                    "the loss returns metrics with this batch, and returned none with the example: ranks that do not"
                    " compute it expect none",
                    remedy="metrics with every batch, {} where there are none",
                )
            return
        if self._wires.watch is not None:
            told: list[Pairs] = self._wires.gather(_added(self._measured))
            self._measured = told

    @property
    def means(self) -> dict[str, float]:
        """Means over the whole batch, by name. A single process waits for its device here, not earlier."""
        # Tensor parallel ranks contribute the same: sums and counts are too large by the same factor.
        return {name: total / number for name, (total, number) in _added(self._measured).items() if number}

    def _observer(self, metrics: Metrics) -> "_Observer":
        return _Observer(metrics, cp=self._cp, pads=self._pads)


class _Observer:
    """Calls a user's function of an output and its microbatch, which returns sums and their numbers."""

    def __init__(self, metrics: Metrics, *, cp: int, pads: bool) -> None:
        self._metrics, self._cp, self._pads = metrics, cp, pads

    def __call__(self, output: object, batch: Batch) -> Pairs:
        if isinstance(batch, Padding):
            return {}
        try:
            with torch.no_grad():
                found = self._metrics(output, batch)
        except ShardwiseError:
            raise
        except Exception as error:
            error.add_note(f"in metrics, {getattr(self._metrics, '__qualname__', self._metrics)}(output, batch)")
            raise
        return pairs_of(found, rows=length_of(batch) if self._pads else 1, cp=self._cp)


def _added(measured: Iterable[Pairs]) -> dict[str, tuple[float, float]]:
    """Return the sums over several microbatches."""
    found: dict[str, tuple[float, float]] = {}
    for pairs in measured:
        for name, (total, number) in pairs.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + _read(total), before[1] + _read(number)
    return found


def _read(number: object) -> float:
    return float(number.double()) if isinstance(number, torch.Tensor) else float(number)  # type: ignore[arg-type]
