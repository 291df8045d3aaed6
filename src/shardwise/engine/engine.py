"""The engine: runs a schedule over stages, step by step, with model state placed as the plan says.

batch ── rows of this replica (dp) ── microbatches ── tokens of this rank (cp) ──┐
                                                                                executor (pp)
module ── its part of layers (tp) ── its experts (ep) ── its stages (pp) ────────┘     │
                                                       REDUCE, GATHER, RELEASE: states (dp, ZeRO, host)

The engine is the same for one process, for a pipeline and for a mesh. Only its components differ (`assemble.py`):
executors of one rank or of all ranks, and wires to other processes or to none.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.explain import explain
from shardwise.engine.make_execution import Execution
from shardwise.engine.make_shown import make_shown
from shardwise.engine.make_states import States
from shardwise.engine.module_state import NotCopied
from shardwise.engine.parts import Parts
from shardwise.engine.rebalance import rebalance
from shardwise.engine.steps import Steps
from shardwise.engine.update import LaunchedStep
from shardwise.execution.collector import StreamCollector
from shardwise.sharding.expert.load import Loads
from shardwise.stages.metrics import Metrics
from shardwise.stages.stage import Batch
from shardwise.trace.events import Trace

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _at_work(method: Callable[Concatenate["Engine", _P], _R]) -> Callable[Concatenate["Engine", _P], _R]:
    """Wrap a method that needs the module's plain tensors. If it fails on a rank, the other ranks are notified."""
    what = "train_step" if method.__name__ == "launch_step" else method.__name__

    @wraps(method)
    def run(self: "Engine", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.shown.open(), self.wires.told_to_all(refusals=False), self.wires.doing(what):
            return method(self, *args, **kwargs)

    return run


def _at_step(method: Callable[Concatenate["Engine", _P], _R]) -> Callable[Concatenate["Engine", _P], _R]:
    """Wrap a method that takes a step, like `_at_work`. A step begins without gradients."""

    @_at_work
    @wraps(method)
    def run(self: "Engine", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self.shown.places.check()
        result = method(self, *args, **kwargs)
        self.shown.places.leave()
        return result

    return run


class Engine(NotCopied):
    """Trains a module under a plan. If ranks are processes, each has an engine, and all call its methods alike.

    `parameters` and `buffers` are those that this process holds. With clipping, `gradient_norm` is the norm of the last
    step before it was clipped. A step that is not finite leaves the weights unchanged: `was_finite` is False then.
    """

    def __init__(self, parts: Parts, execution: Execution, states: States, *, owns_wires: bool) -> None:
        self.module, self.plan, self.split, self.schedule = parts.module, parts.plan, parts.split, parts.schedule
        self.parameters, self._owns_wires = states.parameters, owns_wires
        self.execution, self.states, self.sharded, self.wires = execution, states, parts.sharded, parts.wires
        #: The ranks of the pipeline that this process runs, and the placement of experts; its replica, of how many.
        self.ranks, self.experts = parts.wires.ranks, parts.sharded.experts
        self.replica, self.num_replicas = parts.wires.mesh.coordinates["dp"], parts.plan.dp
        self.steps, self._parts = Steps(parts, execution, states), parts
        self.shown = make_shown(parts, states.parameters, states.buffers, states.data, execution.batches.outside)
        self.shown.guard()
        self.steps.in_evaluation_mode = self.shown.in_evaluation_mode
        self.loads = Loads(self.module, self.experts, self.wires.sum, num_alike=self.plan.tp)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that this process holds, read anew: a forward or a user may have replaced them."""
        return {name: self.module.get_buffer(name) for name in self.states.buffers}

    def explain(self) -> str:
        """Describe how the module (its stages, its sharded layers), batches and the loss are treated."""
        return "\n".join([explain(self._parts), *self.execution.batches.explain(), *self.steps.graphs.explain()])

    @property
    def num_steps(self) -> int:
        """The number of steps begun; dropout masks depend on it. Set it to resume a training."""
        return self.steps.num_begun

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self.steps.num_begun = number

    @property
    def gradient_norm(self) -> float | None:
        return self.states.update.gradient_norm

    @property
    def was_finite(self) -> bool:
        return self.states.update.was_finite

    @property
    def trace(self) -> Trace | None:
        """The trace of all ranks of the last recorded step."""
        return self.execution.recorder.trace

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last step or evaluation, on every rank: means over the whole batch, by name."""
        return self.steps.metrics.means

    @_at_step
    def train_step(
        self, batch: Batch, *, metrics: Metrics | None = None, trace: bool = False, data_wait: float = 0.0,
        streams: StreamCollector | None = None,
    ) -> float:  # fmt: skip
        """Take one step on a batch and return its loss. With `trace`, the step is recorded.

        The batch is the same on every rank; or, with `batch="local"`, the rows of this rank's replica.
        `metrics(output, batch)` is called for every microbatch; `engine.metrics` has the result for the batch.
        `data_wait` is the seconds that the caller just waited for the batch: a recorded step begins with them.
        `streams`, started by the caller, adds the activities of the rank's GPU to the record, and is stopped."""
        return self.steps.train(batch, metrics=metrics, trace=trace, data_wait=data_wait, streams=streams).mean

    @_at_step
    def launch_step(self, batch: Batch) -> LaunchedStep:
        """Take one step like `train_step`; its numbers can be read later, after the next step was launched.

        If one process has all state on its GPU, and fused optimizers that have state, this does not wait for the GPU:
        after a step that was not finite, all are skipped until `go_on`. Otherwise the step is over on return."""
        return self.steps.launch(batch)

    def go_on(self) -> None:
        """Resume updates after a launched step that was not finite."""
        if self.states.device_update is not None:
            self.states.device_update.go_on()

    @_at_work
    @torch.no_grad()
    def evaluate(self, batch: Batch, *, metrics: Metrics | None = None) -> float:
        """Return the loss of a batch in evaluation mode; no state changes. For `metrics` see `train_step`."""
        self.flush()
        return self.steps.evaluate(batch, metrics).mean

    @_at_work
    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Return the module's whole output for a batch in evaluation mode, on every rank; no state changes."""
        self.flush()
        return self.steps.predict(batch)

    @_at_work
    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients of the last step, as given to the optimizer, by original names, on every rank."""
        self.flush()
        return self.states.module.gradients()

    @_at_work
    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return all parameters and buffers, whole, under the names of the original module, on every rank.

        They are copies: no later step changes them. With `sharded`, return this rank's parts, which are the engine's
        own tensors. A tied parameter appears under each of its names."""
        self.flush()
        return self.states.module.part() if sharded else self.states.module.whole()

    @_at_work
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load weights and buffers from a state of the whole module, or of at least what this process holds."""
        self.flush()
        with self.wires.told_to_all():
            self.states.module.load(state)
        self.states.begin_stream()
        self.execution.batches.first.drop()

    @property
    @_at_work
    def numbers(self) -> dict[str, Tensor]:
        """The values of the parameters that this process holds, by name, each where it lives. Call `flush` first."""
        return self.states.module.numbers()

    @_at_work
    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Assemble whole tensors by original names, from the parts that each process holds. All processes call this."""
        return self.states.module.assembled(parts)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of this process."""
        return self.states.data.updates.optimizers

    @_at_work
    def optimizer_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Return the optimizer state by original names (`states/optimizers/state.py`), loadable under any other plan.

        It is whole on every rank; with `sharded`, only that of this rank's parts of its stages' parameters."""
        self.flush()
        return self.states.optimizers.part() if sharded else self.states.optimizers.whole()

    @_at_work
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load optimizer state of all parameters, or of at least those that this process holds."""
        self.flush()
        with self.wires.told_to_all():
            self.states.optimizers.load(state)

    @property
    def host_bytes(self) -> int:
        """The bytes of state that this process now keeps in host memory."""
        return 0 if self.states.host is None else self.states.host.num_bytes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Return the device of the optimizer state of a weight of this process."""
        return self.states.home_of(weight)

    @_at_work
    def expert_load(self) -> dict[str, list[int]]:
        """Return, by layer, how often each expert was chosen in training since the last call, over all ranks."""
        with self.wires.told_to_all():
            return self.loads.told()

    @_at_work
    def rebalance_experts(self, *, gain: float = 0.05) -> dict[str, int]:
        """Place experts, with all their state, by their load since the last call. Return how many moved, by layer.

        A layer is left alone unless the load of its most loaded rank drops by more than `gain`. All ranks call this."""
        self.flush()
        with self.wires.told_to_all():
            return rebalance(self.experts, self.loads, self.states, gain)

    @_at_work
    def flush(self) -> None:
        """Finish all work in flight, on every rank: afterwards weights and state on the host are up to date.

        `evaluate`, `predict`, `state_dict` and `load_state_dict` call this themselves."""
        with self.wires.told_to_all():
            self.states.flush()

    def close(self) -> None:
        """Release what the engine keeps beside the module; and its wires, if it made them."""
        self.flush()
        self.steps.graphs.close()
        self._parts.detach()
        with self.shown.open():
            self.states.close()
        self.shown.close()
        self.execution.close()
        if self._owns_wires:
            self.wires.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.wires.abandon()
