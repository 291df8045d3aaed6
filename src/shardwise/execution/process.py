"""One rank of a pipeline in a process of its own: the same instructions as in `local.py`, with values that travel.

A rank walks down its list. A receive is posted where it stands and waited for only by the computation that reads it; a
send is handed over and never waited for. So a rank stands still only for a value that is not there yet.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import dropwhile
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.continuous_calls import calls_of
from shardwise.execution.interpreter import Interpreter, StageStates, Tally, check_kinds, compute_beside
from shardwise.execution.local import TAKES_TIME, Record
from shardwise.ranks.faults import Watch
from shardwise.ranks.message_layout import Key
from shardwise.ranks.transport import ProcessTransport
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.instruction import COMPUTE, OFFLOADS, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Batch, Loss, Split


class _Entry(NamedTuple):
    """An instruction made ready: the messages that it reads, each with who takes it in, and what running it is."""

    instruction: Instruction
    awaited: tuple[tuple[Key, Callable[[Sequence[Tensor]], None]], ...]
    do: Callable[[], None]


class _Walk(NamedTuple):
    """Instructions to run one after the other, and the messages that they want later."""

    entries: list[_Entry]
    ahead: list[Key]


#: What it runs; what it runs where there are replicas; and what there is nothing to do for, and why.
RUN = (COMPUTE - {Kind.STEP}) | SENDS | RECEIVES | OFFLOADS | {Kind.REDUCE}
RUN_BESIDE = frozenset({Kind.GATHER, Kind.RELEASE})
LEFT = {Kind.STEP: "the engine steps for all stages of the rank at once"}


class ProcessExecutor:
    """Interprets this rank's part of a complete schedule."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        split: Split,
        loss: Loss,
        *,
        transport: ProcessTransport,
        on_reduce: Callable[[Instruction], None],
        policy: ComputePolicy | None = None,
        watch: Watch | None = None,
        beside: StageStates | None = None,
    ) -> None:
        known = RUN | LEFT.keys() if beside is None else RUN | LEFT.keys() | RUN_BESIDE
        check_kinds(schedule, known, "the executor of one rank" + ("" if beside else " without replicas"))
        self._beside = beside
        self.schedule, self.interpreter = schedule, Interpreter(rank, schedule, split, loss, policy)
        self._transport, self._watch, self._on_reduce = transport, watch, on_reduce
        needs = Needs(schedule)
        first = needs.first_node[rank]
        self._entries: list[_Entry] = []
        for position, instruction in enumerate(schedule.orders[rank]):
            read = [needs.nodes[node] for node in needs.before[first + position] if needs.nodes[node].kind in RECEIVES]
            awaited = tuple(
                (key, self.interpreter.receiver(each)) for each in read if (key := self._key(each)) is not None
            )
            self._entries.append(_Entry(instruction, awaited, self._make_ready(instruction)))
        calls = calls_of(schedule, rank)
        self._feeds = [self._make_walk(positions) for positions in calls.feeds]
        self._flushes = [self._make_walk(positions) for positions in calls.flushes]
        self._num_fed = 0

    def _make_walk(self, positions: tuple[int, ...]) -> "_Walk":
        entries = [self._entries[position] for position in positions]
        # A rank that is about to wait for the first time has time to say what else it will want.
        later = dropwhile(lambda entry: not entry.awaited, entries)
        receives = (entry.instruction for entry in later if entry.instruction.kind in RECEIVES)
        return _Walk(entries, [key for each in receives if (key := self._key(each)) is not None])

    def _key(self, instruction: Instruction) -> Key | None:
        """The message of a transfer; None for what is none, or carries nothing."""
        kind, stage, microbatch, peer, _ = instruction
        if peer is None or (kind not in SENDS and kind not in RECEIVES):
            return None
        maker, reader = (stage, peer) if kind in SENDS else (peer, stage)
        activation = kind in (Kind.SEND_F, Kind.RECV_F)
        if not self.interpreter.io.names(*((maker, reader) if activation else (reader, maker))):
            return None
        ranks = self.schedule.placement.ranks
        return Key(ranks[maker], ranks[reader], "F" if activation else "B", maker, reader, microbatch)

    @property
    def interpreters(self) -> list[Interpreter]:
        """That of this rank."""
        return [self.interpreter]

    @property
    def is_full(self) -> bool:
        """Whether all steps of the schedule have been fed, so that the pipe must be emptied before the next."""
        return self._num_fed == self.schedule.num_steps

    def run(self, microbatches: list[Batch], *, signature: Hashable, record: Record | None = None) -> Tally:
        """Run one step from beginning to end, and return the loss of what this rank saw of it."""
        self._num_fed = 0
        tally = self.feed(microbatches, signature=signature, record=record)
        self.flush(record=record)
        return tally

    def feed(self, microbatches: list[Batch], *, signature: Hashable, record: Record | None = None) -> Tally:
        """Run what the next step's batch lets run. All steps from one flush to the next are alike."""
        step = self._num_fed
        if step == 0:
            self.interpreter.begin()
            self._transport.begin_step(signature)
        self.interpreter.take(step, microbatches)
        self._walk(self._feeds[step], record)
        self._num_fed += 1
        return self.interpreter.tally(step)

    def flush(self, *, record: Record | None = None) -> None:
        """Run what is left of the steps that were fed, and wait until all that was sent has arrived."""
        self._walk(self._flushes[self._num_fed - 1], record)
        self._num_fed = 0
        self._transport.finish()
        self.interpreter.finish()

    def _walk(self, walk: _Walk, record: Record | None) -> None:
        interpreter, transport, watch = self.interpreter, self._transport, self._watch
        has_waited = False
        # A look for cycles among the objects of all of torch would hold up every rank that waits for this one.
        with collection_paused():
            for instruction, awaited, do in walk.entries:
                if watch is not None:
                    watch.at(instruction)
                if awaited:
                    if not has_waited:
                        transport.post_ahead(walk.ahead)
                        has_waited = True
                    if instruction.kind is Kind.I or instruction.beside is not None:
                        interpreter.prepare(instruction)
                    for key, take in awaited:
                        take(transport.receive(key))
                if record is None or instruction.kind not in TAKES_TIME:
                    do()
                else:
                    start = perf_counter()
                    do()
                    record(interpreter.rank, instruction, start, perf_counter())

    def _make_ready(self, instruction: Instruction) -> Callable[[], None]:
        """What running an instruction is, as far as it can be known before."""
        kind, key = instruction.kind, self._key(instruction)
        if kind in COMPUTE and kind is not Kind.STEP:
            if self._beside is None:
                return partial(self.interpreter.compute, instruction)
            return partial(compute_beside, self.interpreter, instruction, self._beside)
        if self._beside is not None and kind in (Kind.GATHER, Kind.RELEASE, Kind.REDUCE):
            return partial(getattr(self._beside, kind.lower()), instruction)
        if kind is Kind.REDUCE:
            return partial(self._on_reduce, instruction)
        if kind in OFFLOADS:
            return partial(self.interpreter.move, instruction)
        if key is None:
            assert kind in SENDS or kind in RECEIVES or kind in LEFT, f"{instruction} is not run"
            return _nothing
        if kind in SENDS:
            send, outgoing = self._transport.send, self.interpreter.io.sender(instruction)
            return lambda: send(key, outgoing())
        return partial(self._transport.post_receive, key)


def _nothing(*_: object) -> None:
    """What carries nothing, or is nobody's to do here."""
