"""One rank of a pipeline in a process of its own: the same instructions as in `local.py`, with values that travel.

A rank walks down its list. A receive is posted where it stands and waited for only by the computation that reads it; a
send is handed over and never waited for. So a rank stands still only for a value that is not there yet.
"""

from collections.abc import Callable, Hashable
from time import perf_counter

from shardwise.runtime.faults import Watch
from shardwise.runtime.interpreter import Interpreter, Loss, Tally
from shardwise.runtime.local import Record
from shardwise.runtime.manner import Manner
from shardwise.runtime.stage import Batch, Split
from shardwise.runtime.transport import Key, Transport
from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule


class ProcessExecutor:
    """Interprets this rank's part of a complete schedule."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        split: Split,
        loss: Loss,
        *,
        transport: Transport,
        on_reduce: Callable[[Instruction], None],
        manner: Manner | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.schedule, self.interpreter = schedule, Interpreter(rank, schedule, split, loss, manner)
        self._transport, self._watch, self._on_reduce = transport, watch, on_reduce
        needs = Needs(schedule)
        first = needs.first_node[rank]
        # With each instruction: the receives that it reads, and the message that a transfer is.
        self._steps: list[tuple[Instruction, list[tuple[Instruction, Key]], Key | None]] = []
        for position, instruction in enumerate(schedule.orders[rank]):
            read = [needs.nodes[node] for node in needs.before[first + position] if needs.nodes[node].kind in RECEIVES]
            awaited = [(each, key) for each in read if (key := self._key(each)) is not None]
            self._steps.append((instruction, awaited, self._key(instruction)))
        # A rank that is about to wait for the first time has time to say what else it will want.
        first_wait = next((number for number, (_, awaited, _) in enumerate(self._steps) if awaited), len(self._steps))
        self._ahead = [key for each, _, key in self._steps[first_wait:] if key is not None and each.kind in RECEIVES]

    def _key(self, instruction: Instruction) -> Key | None:
        """The message of a transfer; None for what is none, or carries nothing."""
        kind, stage, microbatch, peer, _ = instruction
        if peer is None or (kind not in SENDS and kind not in RECEIVES):
            return None
        maker, reader = (stage, peer) if kind in SENDS else (peer, stage)
        activation = kind in (Kind.SEND_F, Kind.RECV_F)
        if not self.interpreter.names(*((maker, reader) if activation else (reader, maker))):
            return None
        ranks = self.schedule.placement.ranks
        return Key(ranks[maker], ranks[reader], "F" if activation else "B", maker, reader, microbatch)

    def run(
        self,
        microbatches: list[Batch],
        *,
        signature: Hashable,
        on_step: Callable[[Instruction], None],
        record: Record | None = None,
    ) -> Tally:
        """Run a step, and return the loss of what this rank saw of it."""
        interpreter, transport = self.interpreter, self._transport
        interpreter.begin(microbatches)
        transport.begin_step(signature)
        has_waited = False
        for instruction, awaited, key in self._steps:
            if self._watch is not None:
                self._watch.at(instruction)
            if awaited and not has_waited:
                transport.post_ahead(self._ahead)
                has_waited = True
            for receive, message in awaited:
                interpreter.incoming(receive, transport.receive(message))
            start = perf_counter()
            self._do(instruction, key, on_step)
            if record is not None:
                record(interpreter.rank, instruction, start, perf_counter())
        transport.finish()
        return interpreter.finish()

    def _do(self, instruction: Instruction, key: Key | None, on_step: Callable[[Instruction], None]) -> None:
        kind = instruction.kind
        if kind is Kind.STEP:
            on_step(instruction)
        elif kind in COMPUTE:
            self.interpreter.compute(instruction)
        elif kind in SENDS:
            if key is not None:
                self._transport.send(key, self.interpreter.outgoing(instruction))
        elif kind in RECEIVES:
            if key is not None:
                self._transport.post_receive(key)
        elif kind is Kind.REDUCE:
            self._on_reduce(instruction)
