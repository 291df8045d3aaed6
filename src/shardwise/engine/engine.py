"""The engine: a schedule run over stages, step by step, with states that live where the plan has them.

batch ── rows of this replica (dp) ── microbatches ── tokens of this rank (cp) ──┐
                                                                                executor (pp)
module ── its part of layers (tp) ── its experts (ep) ── its stages (pp) ────────┘     │
                                                       REDUCE, GATHER, RELEASE: states (dp, ZeRO, host)

It is the same for one process, for a pipeline and for a mesh. What differs is in what it is put together from
(`assemble.py`): executors that run one rank or all, and wires to others or to nobody.
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
    """A method that needs the module's tensors as they are. Of a rank that fails in it the others are told."""

    @wraps(method)
    def run(self: "Engine", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.shown.open(), self.wires.told_to_all(refusals=False):
            return method(self, *args, **kwargs)

    return run


def _at_step(method: Callable[Concatenate["Engine", _P], _R]) -> Callable[Concatenate["Engine", _P], _R]:
    """The same of a method that takes a step, which begins without gradients."""

    @_at_work
    @wraps(method)
    def run(self: "Engine", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self.shown.places.check()
        result = method(self, *args, **kwargs)
        self.shown.places.leave()
        return result

    return run


class Engine:
    """Trains a module under a plan. Where ranks are processes, each has one and all call it alike.

    `parameters` and `buffers` are those that this process holds. After a step `gradient_norm` is that of the whole
    batch before it was clipped, if it was to be. One that is not finite leaves the weights: `was_finite` says so.
    """

    def __init__(self, parts: Parts, execution: Execution, states: States, *, owns_wires: bool) -> None:
        self.module, self.plan, self.split, self.schedule = parts.module, parts.plan, parts.split, parts.schedule
        self.parameters, self._owns_wires = states.parameters, owns_wires
        self.execution, self.states, self.sharded, self.wires = execution, states, parts.sharded, parts.wires
        #: The ranks of the pipeline that this process runs; how experts lie on ranks, where they are shared out.
        self.ranks, self.experts = parts.wires.ranks, parts.sharded.experts
        self.steps, self._parts = Steps(parts, execution, states), parts
        self.shown = make_shown(parts, states.parameters, states.buffers, states.data, execution.batches.outside)
        self.shown.guard()
        #: The data parallel replica that this process is a part of, and how many there are.
        self.replica, self.num_replicas = parts.wires.mesh.coordinates["dp"], parts.plan.dp
        self.loads = Loads(self.module, self.experts, self.wires.sum, num_alike=self.plan.tp)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Those that this process holds. A forward, or a user, may have put others in their places."""
        return {name: self.module.get_buffer(name) for name in self.states.buffers}

    def explain(self) -> str:
        """What became of the module (its stages, how layers are cut), of batches and of the loss."""
        return "\n".join([explain(self._parts), *self.execution.batches.explain(), *self.steps.graphs.explain()])

    @property
    def num_steps(self) -> int:
        """How many steps have been begun: masks of dropout depend on it. One that goes on with a training sets it."""
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
        """What happened on all ranks in the last step that was recorded."""
        return self.execution.recorder.trace

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last step or evaluation, over the whole batch, on every rank: means by name."""
        return self.steps.metrics.means

    @_at_step
    def train_step(
        self, batch: Batch, *, metrics: Metrics | None = None, trace: bool = False, data_wait: float = 0.0,
        streams: StreamCollector | None = None,
    ) -> float:  # fmt: skip
        """Take one step on a batch and return its loss. With `trace` it is recorded.

        The batch is the same on every rank; or with `batch="local"` the rows of this rank's replica.
        `metrics(output, batch)` is given every microbatch's output, and `engine.metrics` has the batch's. `data_wait`
        are seconds that the caller has just stood still for the batch: a recorded step begins with them. `streams`,
        which the caller has started, adds to the record what the rank's GPU did, and is stopped."""
        return self.steps.train(batch, metrics=metrics, trace=trace, data_wait=data_wait, streams=streams).mean

    @_at_step
    def launch_step(self, batch: Batch) -> LaunchedStep:
        """Take one step as `train_step` does; what it has measured can be read later, after the next was launched.

        Where one process has all state on its GPU, and fused optimizers that have some, nobody waits for the GPU here,
        and from a step on that was not finite all are left out until `go_on`. Elsewhere the step is over on return."""
        return self.steps.launch(batch)

    def go_on(self) -> None:
        """Update again, after a launched step that was not finite."""
        if self.states.device_update is not None:
            self.states.device_update.go_on()

    @_at_work
    @torch.no_grad()
    def evaluate(self, batch: Batch, *, metrics: Metrics | None = None) -> float:
        """Return the loss of a batch in evaluation mode; nothing changes. Of `metrics` see `train_step`."""
        self.flush()
        return self.steps.evaluate(batch, metrics).mean

    @_at_work
    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Return what the module returns for a batch in evaluation mode, whole, on every rank; nothing changes."""
        self.flush()
        return self.steps.predict(batch)

    @_at_work
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step as the optimizer was given them, whole, by original names, on every rank."""
        self.flush()
        return self.states.module.gradients()

    @_at_work
    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module: whole, all of them on every rank.

        They are copies: no later step changes them. Or, `sharded`, the parts that this rank has, which are the engine's
        own. A tied parameter is there under each of its names."""
        self.flush()
        return self.states.module.part() if sharded else self.states.module.whole()

    @_at_work
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state, of the whole module or of at least what this process holds."""
        self.flush()
        with self.wires.told_to_all():
            self.states.module.load(state)
        self.states.begin_stream()

    @property
    @_at_work
    def numbers(self) -> dict[str, Tensor]:
        """Those of the parameters that this process holds, by name, each where it lives. First `flush`."""
        return self.states.module.numbers()

    @_at_work
    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by original names, from what each process has of those that it holds. All call it alike."""
        return self.states.module.assembled(parts)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of this process."""
        return self.states.data.updates.optimizers

    @_at_work
    def optimizer_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """What the optimizers remember, by original names (`states/optimizers/state.py`), for any other plan to load.

        Whole, all of it on every rank; or of the parts that this rank has of the parameters of its stages."""
        self.flush()
        return self.states.optimizers.part() if sharded else self.states.optimizers.whole()

    @_at_work
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an optimizer remembered, of all parameters or of at least those that this process holds."""
        self.flush()
        with self.wires.told_to_all():
            self.states.optimizers.load(state)

    @property
    def host_bytes(self) -> int:
        """What this process keeps on the host now, beside its device."""
        return 0 if self.states.host is None else self.states.host.num_bytes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where the state of a weight lives that an optimizer of this process has."""
        return self.states.home_of(weight)

    @_at_work
    def expert_load(self) -> dict[str, list[int]]:
        """By layer, how often each expert was chosen in training since the last call, in the batches of all ranks."""
        with self.wires.told_to_all():
            return self.loads.told()

    @_at_work
    def rebalance_experts(self, *, gain: float = 0.05) -> dict[str, int]:
        """Place experts by their load since the last call, with all that is theirs; how many moved, by layer.

        A layer stays unless its most loaded rank gets more than `gain` less to do. All ranks call this alike."""
        self.flush()
        with self.wires.told_to_all():
            return rebalance(self.experts, self.loads, self.states, gain)

    @_at_work
    def flush(self) -> None:
        """Finish what is under way, on every rank: then weights are the newest, and state of the host is there.

        `evaluate`, `predict`, `state_dict` and `load_state_dict` do this themselves."""
        with self.wires.told_to_all():
            self.states.flush()

    def close(self) -> None:
        """Let go of what the engine keeps beside the module; and of its wires, if it has made them."""
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
        if kind is None:
            self.close()
