"""What both engines do alike: a step, an evaluation, and the state of the module under its own names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.planner.plan import Plan
from shardwise.runtime.batch import cut_batch, shapes_of
from shardwise.runtime.device_clock import clock_of
from shardwise.runtime.dropout import Dropouts, Place, num_tokens_of
from shardwise.runtime.holdings import OPTIMIZER, holdings_of, state_bytes
from shardwise.runtime.interpreter import Interpreter, Tally
from shardwise.runtime.keeping import KeptBytes
from shardwise.runtime.local import Record
from shardwise.runtime.offload.host import Host, make_host
from shardwise.runtime.offload.room import number_bytes_of
from shardwise.runtime.optimizers.share import MakeOptimizer, Share, make_all
from shardwise.runtime.optimizers.state import (
    check_shapes,
    check_states,
    groups_of,
    joined_states,
    load_settings,
    states_of,
    taken,
)
from shardwise.runtime.pipeline import complete
from shardwise.runtime.recording import Recording, Told
from shardwise.runtime.stage import Batch, Split
from shardwise.runtime.state import held_state, load_held_state
from shardwise.runtime.stream import Feedable, Stream
from shardwise.runtime.tensor.streams import Channels
from shardwise.runtime.versions import WeightVersions
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.schedule import Schedule
from shardwise.trace.events import Trace, Traffic


class Trainer(ABC):
    """Trains a module under a plan. Where ranks are processes, each has one and all call it alike.

    `parameters` and `buffers` are those that this process holds. After a step `gradient_norm` is that of the whole
    batch's gradient before it was clipped, if it was to be. A step whose loss or norm is not finite leaves the weights
    alone, and `was_finite` says so.
    """

    #: The ranks that this process runs.
    ranks: tuple[int, ...]

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: Split,
        schedule: Schedule,
        *,
        optimizer: MakeOptimizer | Sequence[Share] | None,
        clip: float | None,
        pad: bool,
    ) -> None:
        self.module, self.plan, self.split = module, plan, stages
        self._clip, self._pad = clip, pad
        self.schedule = self._complete(schedule, stages)
        here = [stage for stage in stages.stages if stage is not None]
        held = {name for stage in here for name in stage.parameters}
        self.parameters = {name: each for name, each in module.named_parameters() if name in held}
        self.buffers: dict[str, Tensor] = {name: each for stage in here for name, each in stage.buffers.items()}
        self._trained = {name: each for name, each in self.parameters.items() if each.requires_grad}
        #: The optimizers of this process, and what makes each.
        self._makers = {} if optimizer is None else make_all(optimizer, self._trained)
        #: What this process keeps on the host, where its plan says so.
        self._host: Host | None = None
        self.gradient_norm: float | None = None
        self.was_finite = True
        self._recording: Recording | None = None
        self._trace: Trace | None = None
        self._stream: Stream | None = None
        #: How many steps have been begun: masks of dropout depend on it. One that goes on with a training sets it.
        self.num_steps = 0
        self._dropouts: Dropouts | None = None
        #: What forwards keep of batches of each signature.
        self._kept: dict[Hashable, KeptBytes] = {}

    @property
    def trace(self) -> Trace | None:
        """What happened on all ranks in the last step that was recorded."""
        if self._recording is not None:
            self._trace, self._recording = self._recording.trace(), None
        return self._trace

    def train_step(self, batch: Batch, *, trace: bool = False, data_wait: float = 0.0) -> float:
        """Take one step on a batch, the same on every rank, and return its loss. With `trace` it is recorded.

        `data_wait` are seconds that the caller has just stood still for the batch: a recorded step begins with them.
        """
        begin = perf_counter()
        recording = self._start_recording() if trace else None
        record = None if recording is None else recording.note
        self._forget_gradients()
        if self._host is not None and self._host.states is not None:
            self._host.states.begin()
        with self._told_to_all():
            microbatches, signature = self._cut(batch), ("train", shapes_of(batch))
            if self._dropouts is not None:
                self._dropouts.take(microbatches, self._place(batch, microbatches[0]))
            self.num_steps += 1
            with self._listening(recording, self._kept.setdefault(signature, {}) if trace else {}):
                if self._stream is not None:
                    tally = self._stream.train_step(microbatches, signature, record)
                    start = perf_counter()
                else:
                    tally = self._run(True, microbatches, signature, record)
                    start = perf_counter()
                    self._step(tally)
                end = perf_counter()
        if recording is not None:
            for rank in self.ranks:
                recording.note_step(rank, start, end)
            recording.settle()
            # So many small things at once would make the collector look through all of torch.
            with self._told_to_all(), collection_paused():
                self._share(recording, (begin, end), data_wait, self._kept[signature])
            self._recording = recording
        return tally.mean

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a batch in evaluation mode; nothing changes."""
        self.flush()
        training = [each for each in self.module.modules() if each.training]
        self.module.eval()
        try:
            with self._told_to_all():
                return self._run(False, self._cut(batch), ("evaluate", shapes_of(batch)), None).mean
        finally:
            for each in training:
                each.training = True

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module: all of them, or what this process holds.

        A tied parameter is there under each of its names. The tensors are the engine's own where it holds them.
        """
        self.flush()
        part = held_state(self.module, [*self.parameters.values(), *self.buffers.values()])
        return part if sharded else self._gather_state(part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state, of the whole module or of at least what this process holds."""
        self.flush()
        with self._told_to_all():
            load_held_state(self.module, [*self.parameters.values(), *self.buffers.values()], state)
        self._begin_stream()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step as the optimizer was given them, whole, by original names, on every rank."""
        self.flush()
        return self.assembled({name: each.grad for name, each in self._trained.items() if each.grad is not None})

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by original names, from what each process has of those that it holds. All call it alike."""
        return dict(parts)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of this process."""
        return list(self._makers)

    def optimizer_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """What the optimizer remembers, by original names: of all parameters, or of those that this process holds.

        `optimizers/state.py` says in which form. It can be loaded under any other plan.
        """
        self.flush()
        names = self._names()
        part = {"state": states_of(self.optimizers, names), "param_groups": groups_of(self.optimizers, names)}
        return self._gather_optimizer_state(part) if not sharded else part

    @torch.no_grad()
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an optimizer remembered, of all parameters or of at least those that this process holds."""
        self.flush()
        with self._told_to_all():
            check_states(state, [name for name, _ in self.module.named_parameters()])
            check_shapes(state["state"], {name: each.shape for name, each in self._trained.items()})
            names = self._names()
            load_settings(self.optimizers, names, state["param_groups"])
            for optimizer in self.optimizers:
                for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
                    optimizer.state.pop(parameter, None)
                    own = state["state"].get(names[parameter])
                    if own is not None:
                        optimizer.state[parameter] = taken(own, parameter, optimizer, self.home_of(parameter))

    @property
    def host_bytes(self) -> int:
        """What this process keeps on the host now, beside its device."""
        return 0 if self._host is None else self._host.num_bytes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where the state of a weight lives that an optimizer of this process has."""
        states = None if self._host is None else self._host.states
        return torch.device("cpu") if states is not None and weight in states.weights else weight.device

    def _names(self) -> dict[Tensor, str]:
        return {each: name for name, each in self._trained.items()}

    def flush(self) -> None:
        """Finish what is under way: then the weights are the newest, and state that lives on the host is there.

        `evaluate`, `state_dict` and `load_state_dict` do this themselves. Every rank calls it.
        """
        if self._stream is not None:
            with torch.enable_grad(), self._told_to_all():
                self._stream.flush()
        if self._host is not None and self._host.states is not None:
            self._host.states.wait()

    def close(self) -> None:
        """Let go of what the engine keeps beside the module."""
        self.flush()
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _draw_alike(
        self, seed: int, callers: Collection[str], channels: Callable[[], Channels | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Let dropouts, and `callers` of functions that drop, drop what they would under any plan."""
        dropouts = Dropouts(seed=seed, channels=channels, attends=self.plan.cp == 1)
        if dropouts.attach(self.module, callers):
            self._dropouts = dropouts
            for interpreter in self._feedable()[1]:
                interpreter.select_rows = dropouts.select

    def _place(self, batch: Batch, microbatch: Batch) -> Place:  # noqa: ARG002 - alone, all of it is here
        """Where the first microbatch of this process stands in a batch."""
        return Place(step=self.num_steps, first_row=0, num_tokens=num_tokens_of(microbatch))

    def _cut(self, batch: Batch) -> list[Batch]:
        return cut_batch(batch, self.plan.microbatches, pad=self._pad)

    def _begin_stream(self) -> None:
        """Where the schedule never empties the pipe: start with an empty one, and the weights as they are."""
        if self.schedule.staleness:
            executor, interpreters = self._feedable()
            self._stream = Stream(
                executor,
                WeightVersions(self.module, self._trained),
                agree=self._agree,
                finish=self._finish,
                update=self._step,
            )
            for interpreter in interpreters:
                interpreter.select_weights = self._stream.select_weights

    def _step(self, tally: Tally) -> None:
        """Make the summed gradients those of the whole batch's mean, clip them, and step."""
        self.was_finite = math.isfinite(tally.mean)  # A batch that has none says so here.
        gradients = {name: each.grad for name, each in self._trained.items() if each.grad is not None}
        for gradient in gradients.values():
            gradient.div_(tally.count)
        if self._clip is not None:
            counted = [each for name, each in gradients.items() if self._counts(name)]
            square = torch.tensor(float(nn.utils.get_total_norm(counted)) ** 2, dtype=torch.float64)
            self._sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5
            self.was_finite = self.was_finite and math.isfinite(self.gradient_norm)
            factor = self._clip / (self.gradient_norm + 1e-6)
            if factor < 1:
                for gradient in gradients.values():
                    gradient.mul_(factor)
        if self.was_finite:
            self._update()

    def _update(self) -> None:
        """Step with the gradients that are there."""
        if self._host is not None and self._host.states is not None:
            self._host.states.step()
            return
        for optimizer in self._makers:
            optimizer.step()

    def _begin_host(self) -> None:
        """Have on the host what the plan puts there. All ranks call this alike, when they can talk to each other."""
        device = next((each.device for each in self.parameters.values()), torch.device("cpu"))
        self._host = make_host(self.plan, device, self._number_bytes(), self._from_all)
        for interpreter in self._feedable()[1]:
            interpreter.stash = None if self._host is None else self._host.stash

    def _number_bytes(self) -> Mapping[Optimizer, Callable[[], float]]:
        """The optimizers of this process, and what tells the bytes that each keeps for a number."""
        return {
            optimizer: partial(
                number_bytes_of, make, [each for group in optimizer.param_groups for each in group["params"]]
            )
            for optimizer, make in self._makers.items()
        }

    # What differs between one process and many.

    def _complete(self, schedule: Schedule, stages: Split) -> Schedule:
        """The schedule with all that the engine runs."""
        return complete(schedule, stages)

    def _forget_gradients(self) -> None:
        """Begin a step without the gradients of the last."""
        for optimizer in self._makers:
            optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def _run(self, trains: bool, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        """Run a step or an evaluation from beginning to end, and return the loss of the whole batch."""

    @abstractmethod
    def _feedable(self) -> tuple[Feedable, list[Interpreter]]:
        """What runs steps one after the other, and the interpreters in it."""

    def _from_all(self, given: Any) -> list[Any]:
        """What each process gives."""
        return [given]

    def _agree(self, tally: Tally) -> Tally:
        """The loss of the whole batch, from what was seen of it here."""
        return tally

    @abstractmethod
    def _finish(self, step: int) -> None:
        """Wait until the gradients of a step are complete."""

    @abstractmethod
    def _sum(self, numbers: Tensor, what: str) -> None:
        """Add up numbers over all processes, in place."""

    def _counts(self, name: str) -> bool:  # noqa: ARG002 - alone, all count
        """Whether a parameter is counted here, where each is counted once."""
        return True

    def _gather_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """The whole state, from the part of each process."""
        return part

    def _gather_optimizer_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """The whole state of all optimizers, from the part of each process."""
        return joined_states([part], [name for name, _ in self.module.named_parameters()])

    def _start_recording(self) -> Recording:
        return Recording(self.schedule, self._pipelines(), clock=clock_of(self.parameters.values()))

    def _pipelines(self) -> Sequence[Sequence[int]]:
        """The ranks, in the world, of each pipeline."""
        return [range(self.schedule.num_ranks)]

    @contextmanager
    def _listening(self, recording: Recording | None, kept: KeptBytes) -> Iterator[None]:
        """Let a recording hear what goes on inside of instructions, and have counted what is not known to be kept."""
        if recording is None:
            yield
            return
        interpreters = self._feedable()[1]
        try:
            for interpreter in interpreters:
                interpreter.note_again = recording.note_again
                # Of ranks that take turns no bytes are told.
                interpreter.kept_bytes = kept if len(self.ranks) == 1 else None
            yield
        finally:
            for interpreter in interpreters:
                interpreter.note_again = interpreter.kept_bytes = None

    def _share(self, recording: Recording, window: tuple[float, float], data_wait: float, kept: KeptBytes) -> None:
        """Tell all processes of a step what each has noted."""
        if len(self.ranks) == 1:
            recording.take(0, self._told(recording, 0, window, data_wait, kept))
            return
        # Ranks of one process take turns, and have no step of their own.
        for rank in self.ranks:
            recording.take(rank, recording.told_by(rank))

    def _told(
        self, recording: Recording, rank: int, window: tuple[float, float], data_wait: float, kept: KeptBytes
    ) -> Told:
        """What the one rank of this process, which is `rank` in the world, tells of its step."""
        (place,) = self.ranks
        begin, state = window[0] - data_wait, self._state_bytes()
        held = holdings_of(rank, recording.ran_by(place), begin=begin, state=state, kept=kept)
        sent = self._traffic(rank, recording)
        return recording.told_by(place, window, data_wait=data_wait, holdings=held, traffic=sent)

    def _traffic(self, rank: int, recording: Recording) -> Iterator[Traffic]:  # noqa: ARG002 - alone, nobody
        """What this rank has sent in the step."""
        yield from ()

    def _state_bytes(self) -> dict[str, int]:
        """What this process holds of the model's state, by owner."""
        gradients = [each.grad for each in self._trained.values()]
        found = state_bytes([*self.parameters.values(), *self.buffers.values()], gradients, self.optimizers)
        return {**found, OPTIMIZER: found[OPTIMIZER] - self._hosted_state_bytes()}

    def _hosted_state_bytes(self) -> int:
        return 0 if self._host is None or self._host.states is None else self._host.states.num_bytes

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """Tell the other ranks of an error before it goes on to the caller."""
        yield
