"""What both engines do alike: a step, an evaluation, and the state of the module under its own names."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.named_state import NamedState
from shardwise.execution.continuous import Feedable, Stream
from shardwise.execution.device_clock import clock_of
from shardwise.execution.interpreter import Interpreter, Tally
from shardwise.execution.local import Record
from shardwise.execution.memory_by_owner import OPTIMIZER, PARAMETERS, holdings_of, state_bytes
from shardwise.execution.pipeline import complete
from shardwise.execution.recording import Recording, Told
from shardwise.execution.weight_stash import WeightVersions
from shardwise.planner.plan import Plan
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.dropout import Dropouts, Place, num_tokens_of
from shardwise.sharding.expert.load import Loads
from shardwise.sharding.expert.sharding import ExpertSharding
from shardwise.sharding.rng_tracker import Channels
from shardwise.stages.activation_bytes import KeptBytes
from shardwise.stages.batch import cut_batch, shapes_of
from shardwise.stages.stage import Batch, Split
from shardwise.states.parameter_group import MakeOptimizer, Share, make_all
from shardwise.states.tiers.host import Lodgers, Scene, make_host
from shardwise.states.tiers.host_memory import number_bytes_of
from shardwise.states.tiers.optimizer_in_backward import stages_here
from shardwise.trace.events import Trace, Traffic


class Trainer(NamedState):
    """Trains a module under a plan. Where ranks are processes, each has one and all call it alike.

    `parameters` and `buffers` are those that this process holds. After a step `gradient_norm` is that of the whole
    batch's gradient before it was clipped, if it was to be. A step whose loss or norm is not finite leaves the weights
    alone, and `was_finite` says so.
    """

    #: The ranks that this process runs.
    ranks: tuple[int, ...]
    #: How experts lie on ranks, where they are shared out or have replicas.
    experts: ExpertSharding | None = None

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
        self._makers = {} if optimizer is None else make_all(optimizer, self._trained)
        self._host = None
        self.gradient_norm: float | None = None
        self.was_finite = True
        self._recording: Recording | None = None
        self._trace: Trace | None = None
        self._stream: Stream | None = None
        #: How many steps have been begun: masks of dropout depend on it. One that goes on with a training sets it.
        self.num_steps = 0
        self.loads = Loads(module, self.experts, self._sum, num_alike=plan.tp)
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
        if self._host is not None:
            self._host.begin_step()
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

    def expert_load(self) -> dict[str, list[int]]:
        """By layer, how often each expert was chosen in training since the last call, in the batches of all ranks.

        That is the same on every rank. All call it alike, between steps.
        """
        with self._told_to_all():
            return self.loads.told()

    def rebalance_experts(self, *, gain: float = 0.05) -> dict[str, int]:  # noqa: ARG002 - none are shared out
        """Place experts by the load that was measured since the last call; how many moved, by layer.

        Weights and all that optimizers remember go along, and training does not notice. A layer is left alone unless
        its most loaded rank gets more than `gain` less to do. All ranks call this alike, between steps.
        """
        return {}

    def flush(self) -> None:
        """Finish what is under way: then the weights are the newest, and state that lives on the host is there.

        `evaluate`, `state_dict` and `load_state_dict` do this themselves. Every rank calls it.
        """
        if self._stream is not None:
            with torch.enable_grad(), self._told_to_all():
                self._stream.flush()
        if self._host is not None:
            self._host.wait()

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
        gradients = self._gradients()
        divided = () if self._host is None else self._host.divided
        for name, gradient in gradients.items():
            if self._trained[name] not in divided:
                gradient.div_(tally.count)
        if self._clip is not None:
            # The norm of a norm is itself.
            norms = {} if self._host is None else self._host.norms
            counted = [norms.get(self._trained[name], each) for name, each in gradients.items() if self._counts(name)]
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

    def _begin_host(self, lodgers: Lodgers | None = None) -> None:
        """Have on the host what the plan puts there. All ranks call this alike, when they can talk to each other.

        `lodgers` are weights that others bring to their use.
        """
        device = next((each.device for each in self.parameters.values()), torch.device("cpu"))
        stages = stages_here(self.schedule, self.ranks, self.split.stages)
        scene = Scene(
            module=self.module, stages=stages, schedule=self.schedule, apart=self.split.ties, lodgers=lodgers
        )  # fmt: skip
        self._host = make_host(self.plan, device, self._number_bytes(), self._from_all, scene)
        if self._host is None:
            return
        if self._makers:
            self._host.update_early(self._find_count, waits=self._clip is not None)
        for interpreter in self._feedable()[1]:
            interpreter.stash, interpreter.before = self._host.stash, self._host.before

    def _find_count(self) -> float | None:
        """What the gradients of this step will be divided by, once its loss is known; None for one that is not finite.

        Asked while its last backwards go on.
        """
        tally = self._find_tally()
        return tally.count if tally is not None and tally.count and math.isfinite(tally.mean) else None

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
        return complete(schedule, stages, offloads_activations=self.plan.offload.activations > 0)

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
    def _find_tally(self) -> Tally | None:
        """The same while a step goes on: None if it is not known yet."""

    @abstractmethod
    def _finish(self, step: int) -> None:
        """Wait until the gradients of a step are complete."""

    @abstractmethod
    def _sum(self, numbers: Tensor, what: str) -> None:
        """Add up numbers over all processes, in place."""

    def _counts(self, name: str) -> bool:  # noqa: ARG002 - alone, all count
        """Whether a parameter is counted here, where each is counted once."""
        return True

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
        found = state_bytes(self._held, gradients, self.optimizers)
        away = 0 if self._host is None else self._host.away_bytes
        on_device = {PARAMETERS: found[PARAMETERS] - away, OPTIMIZER: found[OPTIMIZER] - self._hosted_state_bytes()}
        return {**found, **on_device}

    def _hosted_state_bytes(self) -> int:
        return 0 if self._host is None or self._host.states is None else self._host.states.num_bytes

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """Tell the other ranks of an error before it goes on to the caller."""
        yield
