"""The computation of a step as a CUDA graph: forwards and backwards are captured once, and replayed from then on.

    step 1         eager: memory is allocated, kernels are chosen and compiled
    step 2         eager, and watched: does the host wait for the GPU, or draw random numbers?
    step 3         captured, and replayed
    step 4, ...    the batch is copied to where the graph reads it, and the graph replayed

The update is not in the graph, so learning rates, clipping and other settings may change from step to step. Gradients
are in the same memory every time. A batch of another shape, a tensor of the module at another address, a layer in
another mode, or another number that the loss refers to: each needs another graph, captured at its third step. Any other
value that a function reads is frozen in the graph at its capture.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.engine.make_states import States
from shardwise.engine.parts import Parts
from shardwise.execution.gpu_graphs import CudaGraphs, Graphs, Seen
from shardwise.execution.step_losses import Tally
from shardwise.planner.plan import Offload
from shardwise.ranks.wires import OneProcess
from shardwise.sharding.dropout import Dropouts
from shardwise.stages.rows import changed, nodes
from shardwise.stages.stage import Batch
from shardwise.torch_private import (
    accumulated_hooks,
    buffer_slots,
    gradient_hooks,
    is_watched,
    num_hooks,
    saved_tensor_hooks,
)

#: Whether steps are captured: True, wherever possible; False, never; "auto", if a replay was measured to be faster.
How = bool | Literal["auto"]
_LOG = logging.getLogger("shardwise")
#: The limit on graphs: each holds the memory of a step.
_MOST_GRAPHS = 4
_MOST_KEYS = 64
#: Under "auto", a replay must be faster than the eager step by this factor.
_WORTH = 1.03
_PLAIN = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """A captured computation: its input tensors, its replay function, its losses and gradients."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    tally: Tally
    gradients: list[tuple[nn.Parameter, Tensor]]

    def run(self, microbatches: Sequence[Batch]) -> Tally:
        for mine, given in zip(self.inputs, _tensors(microbatches), strict=True):
            mine.copy_(given, non_blocking=True)
        self.replay()
        self.give()
        return self.tally.again()

    def give(self) -> None:
        """Set the parameters' `grad` to the graph's gradients."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


class StepGraphs:
    """The graphs of one engine. `graphs` captures them."""

    def __init__(self, parts: Parts, states: States, dropouts: Dropouts | None, graphs: Graphs | None = None) -> None:
        self._how: How = parts.options.graphs
        self._graphs = graphs or CudaGraphs(parts.device)
        self._device, self._losses = parts.device, _functions_of(parts.loss)
        self._parameters = list(states.parameters.values())
        self._modules = list(parts.module.modules())
        self._buffers = [(slots, key) for each in self._modules for slots in [buffer_slots(each)] for key in slots]
        self._theirs = [each for each in self._modules if not _is_known(type(each))]
        self._made: dict[Hashable, _Graph] = {}
        self._seen: dict[Hashable, Seen | None] = {}
        #: Why steps run eagerly, if they do.
        self.problem = None if self._how is False else self._first_problem(parts, states, dropouts)
        if self.problem is not None:
            self._say(self.problem)

    def _first_problem(self, parts: Parts, states: States, dropouts: Dropouts | None) -> str | None:
        found = problems_of(parts, states, dropouts, self._graphs.device_type)
        if self._how == "auto" and (self._theirs or not _is_known(self._losses[-1])):
            found.append("code of others may do on the host what no graph would see: graphs=True captures it")
        return found[0] if found else None

    def explain(self) -> list[str]:
        """Describe whether steps are captured, in lines."""
        if self._how is False or (self._how == "auto" and not self._made):
            return []
        if self.problem is not None:
            return [f"steps are not captured as CUDA graphs: {self.problem}"]
        return [f"steps are captured as CUDA graphs: {len(self._made)} so far"]

    def run(self, microbatches: list[Batch], compute: Callable[[list[Batch]], Tally]) -> Tally:
        """Run a step by `compute` or by a graph of it: return its losses, and leave gradients at the parameters."""
        is_off = self._how is False or (self.problem is not None and not self._made)
        key = None if is_off or self._is_looked_at() else self._key(microbatches)
        graph = None if key is None else self._made.get(key)
        if graph is not None:
            return graph.run(microbatches)
        if key is None or self.problem is not None:
            return compute(microbatches)
        if key not in self._seen:
            if len(self._seen) >= _MOST_KEYS:
                self._seen.clear()
            self._seen[key] = None
            return compute(microbatches)
        seen = self._seen[key]
        if seen is None:
            with self._graphs.watched() as seen:
                tally = compute(microbatches)
            self._seen[key] = seen
            if seen.problems:
                self._stop(seen.problems[0])
            elif self._how == "auto" and not seen.is_launch_bound:
                self._stop("the GPU is what takes long")
            return tally
        if len(self._made) >= _MOST_GRAPHS:
            self._stop(f"{_MOST_GRAPHS} graphs are kept, and this step is none of them: batches have many shapes")
            return compute(microbatches)
        return self._captured(key, seen, microbatches, compute)

    def _captured(
        self, key: Hashable, seen: Seen, microbatches: list[Batch], compute: Callable[[list[Batch]], Tally]
    ) -> Tally:
        """Capture a step, and replay it once; or run it eagerly, if the capture fails."""
        static = [changed(each, _copied) for each in microbatches]
        try:
            tally, replay = self._graphs.capture(partial(compute, static))
        except Exception as error:
            # A failed capture has computed nothing, so gradients are as before.
            for each in self._parameters:
                each.grad = None
            self._stop(f"a capture failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})")
            return compute(microbatches)
        held = [(each, each.grad) for each in self._parameters if each.grad is not None]
        graph = _Graph(inputs=list(_tensors(static)), replay=replay, tally=tally, gradients=held)
        seconds = self._graphs.seconds(replay)
        if self._how == "auto" and seconds * _WORTH > seen.device_seconds:
            # The graph's results are those of this step: its batch was copied at the capture.
            self._stop(f"a replay takes {seconds * 1e3:.2f} ms, and the step as it is {seen.device_seconds * 1e3:.2f}")
        else:
            self._made[key] = graph
        graph.give()
        return graph.tally.again()

    def _is_looked_at(self) -> bool:
        """Whether operators or saved tensors are observed (modes, hooks): a replay would show nothing."""
        return is_watched() or saved_tensor_hooks() is not None or torch.is_anomaly_enabled()

    def _key(self, microbatches: Sequence[Batch]) -> Hashable | None:
        """Return all that a captured step depends on; None if a batch has other values than tensors and plain ones."""
        leaves: list[Hashable] = []
        for path, each in (leaf for batch in microbatches for leaf in nodes(batch)):
            if isinstance(each, Tensor):
                if each.device != self._device or each.requires_grad:
                    return None
                leaves.append((path, each.shape, each.stride(), each.dtype))
            elif isinstance(each, _PLAIN):
                leaves.append((path, each))
            elif not isinstance(each, (dict, list, tuple)):
                return None
        buffers = [slots[key] for slots, key in self._buffers]
        return (
            tuple(leaves),
            tuple(each.data_ptr() for each in self._parameters),
            tuple(None if each is None else each.data_ptr() for each in buffers),
            tuple(each.requires_grad for each in self._parameters),
            tuple(each.training for each in self._modules),
            num_hooks(self._modules),
            tuple(values for each in self._theirs for values in _plain_values(vars(each))),
            tuple(values for each in self._losses for values in _plain_values(_at_hand(each))),
            torch.is_autocast_enabled("cuda"),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _stop(self, problem: str) -> None:
        """Run new kinds of steps eagerly from now on. Existing graphs stay."""
        self.problem = problem
        self._say(problem)
        self._seen.clear()

    def _say(self, problem: str) -> None:
        level = logging.WARNING if self._how is True else logging.INFO
        _LOG.log(level, "steps are not captured as CUDA graphs: %s", problem)

    def close(self) -> None:
        self._made.clear()
        self._seen.clear()


def problems_of(parts: Parts, states: States, dropouts: Dropouts | None, device_type: str = "cuda") -> list[str]:
    """Return the reasons, as sentences, why no step of an engine can be captured; empty if it can."""
    plan, found = parts.plan, list[str]()
    if parts.device.type != device_type:
        found.append(f"the module is on {parts.device.type}")
    if not isinstance(parts.wires, OneProcess):
        found.append("several processes wait for each other in it")
    if parts.schedule.staleness:
        found.append(f"with schedule={parts.schedule.name} a step goes on in the next")
    if plan.offload != Offload():
        found.append("the host moves what the plan keeps there (offload)")
    elif not states.data.sharing.local:
        found.append("gradients are added to copies in full precision: masters=False, or weights in fp32")
    if plan.recompute != "none":
        found.append(f"recompute={plan.recompute} asks where random numbers are")
    if dropouts is not None:
        found.append("masks of dropout follow from the number of the step")
    if parts.options.compile:
        # On an H200 (torch 2.11) a capture of compiled blocks failed, and with dropout the step after it too.
        found.append("blocks are compiled: compile=False, or steps as they are")
    if parts.split.left:
        found.append(f"forwards write the attribute {parts.split.left[0][1]}")
    if parts.written:
        found.append(f"forwards write the buffer {min(parts.written)}")
    if parts.has_metrics:
        found.append("the loss returns metrics")
    if any(gradient_hooks(each) or accumulated_hooks(each) for each in states.parameters.values()):
        found.append("parameters have hooks")
    return found


def _is_known(kind: Any) -> bool:
    """Whether something is of torch's or ours, which keeps nothing on the host from one step to the next."""
    return str(getattr(kind, "__module__", "")).split(".")[0] in ("torch", "shardwise")


def _functions_of(loss: Any) -> list[Any]:
    """Return an engine's loss, the functions that it wraps, and so on down to the user's."""
    kind = loss if hasattr(loss, "__code__") else type(loss)
    inner = next((each for each in _at_hand(loss).values() if callable(each)), None) if _is_known(kind) else None
    return [loss] if inner is None else [loss, *_functions_of(inner)]


def _at_hand(function: Any) -> dict[str, Any]:
    """Return the values that a function can read: attributes of its bound object, its closure, partial arguments."""
    if isinstance(function, partial):
        return {"": function.func, **{str(n): each for n, each in enumerate(function.args)}, **function.keywords}
    code, bound = getattr(function, "__code__", None), getattr(function, "__self__", None)
    found = dict(getattr(function if bound is None else bound, "__dict__", {}))
    if code is not None:
        cells = getattr(function, "__closure__", None) or ()
        found.update(zip(code.co_freevars, (each.cell_contents for each in cells), strict=True))
    return found


def _plain_values(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in values.items() if isinstance(each, _PLAIN))


def _tensors(microbatches: Sequence[Batch]) -> Iterator[Tensor]:
    return (each for batch in microbatches for _, each in nodes(batch) if isinstance(each, Tensor))


def _copied(path: str, each: Any) -> Any:
    del path
    return each.clone() if isinstance(each, Tensor) else None
