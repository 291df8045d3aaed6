"""What engines of many processes do alike: tell each other what fails, add up, and run their rank's list."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.trainer import Trainer
from shardwise.execution.compute_policy import Manner
from shardwise.execution.continuous import Feedable
from shardwise.execution.interpreter import Interpreter, Tally
from shardwise.execution.pipeline import forward_only
from shardwise.execution.process import Beside, ProcessExecutor
from shardwise.execution.recording import Recording
from shardwise.execution.trace_gather import share_notes
from shardwise.ranks.clocks import SharedClock
from shardwise.ranks.faults import LIMIT_SECONDS, Waiter, Watch
from shardwise.ranks.links import make_transport
from shardwise.ranks.transport import ProcessTransport
from shardwise.schedule.instruction import SENDS, Instruction
from shardwise.stages.activation_bytes import KeptBytes
from shardwise.stages.losses import by_rows
from shardwise.stages.stage import Loss
from shardwise.states.batch_norm import SharedStatistics
from shardwise.trace.events import Traffic

#: How long a rank may be at one instruction where it may be compiling.
_COMPILING_SECONDS = 300.0


class ConnectedTrainer(Trainer):
    """Trains with other processes, which all call it alike. `rank` is this one's place in its pipeline."""

    rank: int
    _transport: ProcessTransport
    _trainer: ProcessExecutor
    _evaluator: ProcessExecutor
    #: Statistics of batch norms of which others have copies.
    _statistics: SharedStatistics | None = None
    #: The sum of this step's loss over all ranks, if it has been begun.
    _agreement: tuple[Tensor, Any] | None = None

    def _connect(self, *, compiles: bool = False) -> None:
        """Begin to watch the other ranks of the world. One that compiles its blocks may stand still for a long time."""
        limit_seconds = _COMPILING_SECONDS if compiles else LIMIT_SECONDS
        self._watch = Watch(dist.get_rank(), dist.get_world_size(), limit_seconds=limit_seconds)
        # Numbers that all ranks add up or tell each other have a group of their own: one that is given up on must not
        # take another's with it.
        self._everybody = dist.new_group(backend="gloo")
        self._watch.guard(self._everybody)
        self._clock = SharedClock(self._everybody, self._watch)

    def _make_transport(
        self, pipelines: Sequence[Sequence[int]], device: torch.device, watch: Waiter
    ) -> ProcessTransport:
        """Make what moves values over the links that the schedule sends over."""
        ranks, every = self.schedule.placement.ranks, (each for order in self.schedule.orders for each in order)
        links = {
            (ranks[each.stage], ranks[each.peer]) for each in every if each.kind in SENDS and each.peer is not None
        }
        return make_transport(pipelines, links, device=device, watch=watch)

    def _make_executors(
        self,
        loss: Loss,
        *,
        watch: Waiter,
        on_reduce: Callable[[Instruction], None],
        beside: Beside | None = None,
    ) -> None:
        """Make what runs a step of this rank, and what runs an evaluation."""
        self._trainer, self._evaluator = (
            ProcessExecutor(
                self.rank,
                each,
                self.split,
                by_rows(loss) if self._pad else loss,
                manner=Manner.of(self.plan),
                transport=self._transport,
                on_reduce=on_reduce,
                watch=watch,
                beside=beside,
            )
            for each in (self.schedule, forward_only(self.schedule))
        )
        self._trainer.interpreter.on_losses = self._agree_early

    def close(self) -> None:
        """Stop watching the other ranks, and end what groups have: a thread and a connection for each other rank."""
        super().close()
        self._disconnect()
        self._transport.close()
        self._watch.close()
        if self._watch.guarded:
            # gloo ends them with the last name for the group.
            del self._everybody, self._clock
        while self._watch.guarded:
            guarded = self._watch.guarded.pop()
            if isinstance(guarded, dist.ProcessGroup):
                dist.destroy_process_group(guarded)

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of what else holds groups."""

    def _feedable(self) -> tuple[Feedable, list[Interpreter]]:
        return self._trainer, [self._trainer.interpreter]

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._watch.fail(error)
            raise

    def _agree(self, tally: Tally) -> Tally:
        """Last stages have seen the loss, each of its rows and tokens, tensor parallel ranks the same: now all have."""
        numbers, work = self._agreement or self._start_agreeing(tally)
        self._agreement = None
        self._watch.wait(work, "the sum of the loss")
        return self._agreed(numbers)

    def _agree_early(self) -> None:
        """Begin to agree while backwards go on: a rank that has ended its own can update its weights then."""
        # A host that asks a GPU for a number waits for all that it has told it to do.
        if self._stream is None and all(each.device.type == "cpu" for each in self.parameters.values()):
            self._find_tally()

    def _find_tally(self) -> Tally | None:
        # All ranks agree once in a step, each as soon as it can; what else they might tell all others meanwhile is told
        # in another order then.
        if self._agreement is None:
            tally = None if self._shares_statistics else self._trainer.interpreter.find_tally(0)
            if tally is None:
                return None
            self._agreement = self._start_agreeing(tally)
        numbers, work = self._agreement
        return self._agreed(numbers) if work.is_completed() else None

    def _start_agreeing(self, tally: Tally) -> tuple[Tensor, Any]:
        numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
        return numbers, dist.all_reduce(numbers, group=self._everybody, async_op=True)

    def _agreed(self, numbers: Tensor) -> Tally:
        total, count = (numbers / self.plan.tp).tolist()
        return Tally(total=total, count=count)

    @property
    def _shares_statistics(self) -> bool:
        """Whether batch norms of copies tell each other what they have seen, at the end of each step."""
        return self._statistics is not None and self._statistics.are_there

    def _sum(self, numbers: Tensor, what: str) -> None:
        work: Any = dist.all_reduce(numbers, group=self._everybody, async_op=True)
        self._watch.wait(work, what)

    def _from_all(self, given: Any) -> list[Any]:
        return self._gather(given)

    def _gather(self, given: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """What each rank of a group gives, on every one of them; without a group it is of all."""
        among = self._everybody if group is None else group
        told = [None for _ in range(dist.get_world_size(among))]
        self._watch.at("the gathering of what ranks hold")
        try:
            dist.all_gather_object(told, given, group=among)
        except RuntimeError as error:
            self._watch.explain(error)
        return told

    @contextmanager
    def _listening(self, recording: Recording | None, kept: KeptBytes) -> Iterator[None]:
        with super()._listening(recording, kept):
            if recording is None:
                yield
                return
            self._transport.sent.clear()
            self._watch.note, self._watch.note_beside = recording.note_wait, recording.note_beside
            try:
                yield
            finally:
                self._watch.note = self._watch.note_beside = None

    def _share(self, recording: Recording, window: tuple[float, float], data_wait: float, kept: KeptBytes) -> None:
        """Everybody tells everybody, by one clock, which all of the world ask for."""
        share_notes(
            recording,
            self._told(recording, dist.get_rank(), window, data_wait, kept),
            gather=self._gather,
            correction=self._clock.correction(),
            num_ranks=dist.get_world_size(),
        )

    def _traffic(self, rank: int, recording: Recording) -> Iterator[Traffic]:
        pipeline = recording.pipeline_of(rank)
        for target, (num_messages, num_bytes) in self._transport.sent.items():
            yield Traffic(rank, pipeline[target], "values", num_messages, num_bytes)
