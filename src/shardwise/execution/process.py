"""One rank of a pipeline in a process of its own: the same instructions as in `local.py`, with real transfers.

A rank walks down its list. A receive is posted at its position and waited for only by the computation that reads it. A
send is handed to the transport and never waited for. So a rank waits only for values that have not arrived yet.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import dropwhile
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.executor import TAKES_TIME, Executor, Record, calls_of
from shardwise.execution.interpreter import Interpreter, StageStates
from shardwise.ranks.faults import Watch
from shardwise.ranks.message_layout import Key
from shardwise.ranks.transport import ProcessTransport
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.instruction import COMPUTE, OFFLOADS, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Loss, Split


class _Entry(NamedTuple):
    """A prepared instruction: the messages that it reads, each with the function that stores it, and its action."""

    instruction: Instruction
    awaited: tuple[tuple[Key, Callable[[Sequence[Tensor]], None]], ...]
    do: Callable[[], None]


class _Walk(NamedTuple):
    """Instructions to run in order, and the messages they receive from the first wait on."""

    entries: list[_Entry]
    ahead: list[Key]


#: The kinds that this executor runs; and those that need no action, with the reason.
RUN = (COMPUTE - {Kind.STEP}) | SENDS | RECEIVES | OFFLOADS | {Kind.REDUCE}
LEFT = {Kind.STEP: "the engine steps for all stages of the rank at once"}


class ProcessExecutor(Executor):
    """Interprets this rank's part of a complete schedule. Without `beside`, `on_reduce` runs a REDUCE."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        split: Split,
        loss: Loss | None,
        *,
        transport: ProcessTransport,
        on_reduce: Callable[[Instruction], None],
        policy: ComputePolicy | None = None,
        watch: Watch | None = None,
        beside: StageStates | None = None,
    ) -> None:
        name = "the executor of one rank" + ("" if beside else " without replicas")
        self.interpreter = Interpreter(rank, schedule, split, loss, policy)
        super().__init__(schedule, [self.interpreter], RUN | LEFT.keys(), name, beside)
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

    def _make_walk(self, positions: tuple[int, ...]) -> _Walk:
        entries = [self._entries[position] for position in positions]
        # A rank about to wait for the first time has time to post all later receives.
        later = dropwhile(lambda entry: not entry.awaited, entries)
        receives = (entry.instruction for entry in later if entry.instruction.kind in RECEIVES)
        return _Walk(entries, [key for each in receives if (key := self._key(each)) is not None])

    def _key(self, instruction: Instruction) -> Key | None:
        """Return the message of a transfer; None for another instruction, or a transfer without values."""
        kind, stage, microbatch, peer, _ = instruction
        if peer is None or (kind not in SENDS and kind not in RECEIVES):
            return None
        maker, reader = (stage, peer) if kind in SENDS else (peer, stage)
        activation = kind in (Kind.SEND_F, Kind.RECV_F)
        if not self.interpreter.io.names(*((maker, reader) if activation else (reader, maker))):
            return None
        ranks = self.schedule.placement.ranks
        return Key(ranks[maker], ranks[reader], "F" if activation else "B", maker, reader, microbatch)

    def _begin(self, signature: Hashable) -> None:
        self._transport.begin_step(signature)

    def _end(self) -> None:
        self._transport.finish()

    def _walk(self, what: _Walk, record: Record | None) -> None:
        interpreter, transport, watch = self.interpreter, self._transport, self._watch
        has_waited = False
        # A garbage collection over all of torch's objects would delay every rank that waits for this one.
        with collection_paused():
            for instruction, awaited, do in what.entries:
                if watch is not None:
                    watch.at(instruction)
                if awaited:
                    if not has_waited:
                        transport.post_ahead(what.ahead)
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
        if watch is not None:
            watch.at("the end of its instructions")

    def _make_ready(self, instruction: Instruction) -> Callable[[], None]:
        """Return a function that runs an instruction, with all lookups done in advance."""
        own = self._find_own(self.interpreter, instruction)
        if own is not None:
            return own
        kind, key = instruction.kind, self._key(instruction)
        if kind is Kind.REDUCE:
            return partial(self._on_reduce, instruction)
        if key is None:
            assert kind in SENDS or kind in RECEIVES or kind in LEFT, f"{instruction} is not run"
            return lambda: None  # A transfer without values, or a kind of `LEFT`.
        if kind in SENDS:
            send, outgoing = self._transport.send, self.interpreter.io.sender(instruction)
            return lambda: send(key, outgoing())
        return partial(self._transport.post_receive, key)
