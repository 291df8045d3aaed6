"""Simulate a schedule with given prices, and return a trace.

Each rank runs its list in order. A computation occupies the device. An instruction that moves bytes is issued when the
computation before it has finished, and then runs beside later computation, in order on each link and on each of a
rank's other lanes. A transfer starts when it has been sent *and* its receive has been posted, as with real network
buffers.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import chain

from shardwise.errors import ShardwiseError
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.prices import Prices
from shardwise.schedule.schedule import Schedule
from shardwise.trace.events import Event, Lane, Trace


@collection_paused()
def simulate(schedule: Schedule, prices: Prices) -> Trace:
    """Return the trace of a schedule. Sends and receives are inserted if the schedule has none yet."""
    return play(insert_communication(schedule), prices)


@collection_paused()
def play(schedule: Schedule, prices: Prices) -> Trace:
    """Return the trace of the instructions run exactly as listed."""
    return _Player(schedule, prices).run()


class StuckError(ShardwiseError):
    """The ranks are deadlocked. `waiting` maps each stuck node to the node that it waits for."""

    def __init__(self, waiting: dict[int, int]) -> None:
        super().__init__(f"{len(waiting)} ranks wait for each other", remedy="verify(schedule) says where")
        self.waiting = waiting

    def __reduce__(self) -> tuple[object, ...]:
        return StuckError, (self.waiting,)


LANES = {
    **dict.fromkeys(COMPUTE, Lane.COMPUTE),
    Kind.STEP: Lane.STEP,
    **dict.fromkeys(SENDS, Lane.SEND),
    **dict.fromkeys(RECEIVES, Lane.RECEIVE),
    Kind.GATHER: Lane.COLLECTIVE,
    Kind.REDUCE: Lane.COLLECTIVE,
    Kind.RELEASE: Lane.COLLECTIVE,
    Kind.OFFLOAD: Lane.OFFLOAD,
    Kind.RELOAD: Lane.RELOAD,
}

#: Kinds that take no time and wait for nothing.
_INSTANT = frozenset({Kind.RELEASE})


@dataclass(slots=True, eq=False)
class _Queue:
    """Instructions that share a link or a copy engine: a FIFO, whose items also finish in order."""

    waiting: deque[int] = field(default_factory=deque)
    busy: bool = False
    last_end: float = 0.0


@dataclass(slots=True, eq=False)
class _Running:
    """The computation in progress on a rank, and the transfers beside it."""

    node: int | None = None
    remaining: float = 0.0
    since: float = 0.0
    ends_at: float = 0.0
    num_transfers: int = 0


class _Paces:
    """The computation in progress on each rank and its pace: slower while transfers run beside it. A scheduled end
    moves whenever the pace changes."""

    def __init__(self, num_ranks: int, slowdown: float) -> None:
        self._running = [_Running() for _ in range(num_ranks)]
        self._slow = 1 + slowdown

    def start(self, rank: int, node: int, now: float, seconds: float) -> float:
        """Start a computation of `seconds` without transfers, and return its end at the present pace."""
        running = self._running[rank]
        running.node, running.remaining, running.since = node, seconds, now
        running.ends_at = now + seconds * self._pace(running)
        return running.ends_at

    def finish(self, rank: int) -> None:
        self._running[rank].node = None

    def is_current(self, rank: int, node: int, now: float) -> bool:
        """Whether an end is still valid; False if a transfer that began or ended since has moved it."""
        running = self._running[rank]
        return running.node == node and running.ends_at == now

    def change(self, ranks: Iterable[int], now: float, num_more: int) -> list[tuple[float, int]]:
        """Add to the number of transfers beside these ranks, and return the new ends of computations that moved."""
        moved = []
        for rank in ranks:
            running = self._running[rank]
            old = self._pace(running)
            running.num_transfers += num_more
            new = self._pace(running)
            if running.node is None or old == new:
                continue
            running.remaining = max(0.0, running.remaining - (now - running.since) / old)
            running.since = now
            running.ends_at = now + running.remaining * new
            moved.append((running.ends_at, running.node))
        return moved

    def _pace(self, running: _Running) -> float:
        return self._slow if running.num_transfers else 1


class _Player:
    """One simulation. A node starts because another has ended: that one becomes its `after`."""

    def __init__(self, schedule: Schedule, prices: Prices) -> None:
        needs = Needs(schedule)
        self.needs, self.schedule, self.prices = needs, schedule, prices
        count = len(needs.nodes)
        self.nodes, self.rank, self.before = needs.nodes, needs.rank, needs.before
        self.lane = [LANES[instruction.kind] for instruction in needs.nodes]
        self.computes = [instruction.kind in COMPUTE for instruction in needs.nodes]
        self.start: list[float] = [0.0] * count
        self.end: list[float | None] = [None] * count
        self.after: list[int | None] = [None] * count
        self.position = list(needs.first_node)
        self.last_position = [*needs.first_node[1:], count]
        # Heap of future events: ends of nodes, and, as ~node, the times at which a node frees its lane.
        self.events: list[tuple[float, int, int]] = []
        self.num_events = 0
        # Waiters to wake when a node ends: a rank (0 or more) or the queue of a node (as ~node).
        self.waiting: dict[int, list[int]] = {}
        self.queues: dict[tuple[int, int | Lane], _Queue] = defaultdict(_Queue)
        # The queue of each issued node, and the receive of each send once it is posted.
        self.queue_of: list[_Queue | None] = [None] * count
        self.receive_of: list[int | None] = [None] * count
        self.paces = _Paces(schedule.num_ranks, prices.slowdown) if prices.slowdown else None

    def run(self) -> Trace:
        for rank in range(self.schedule.num_ranks):
            self._advance(rank, 0.0, None)
        events, computes = self.events, self.computes
        while events:
            now, _, node = heappop(events)
            if node < 0:
                self._free_lane(~node, now)
            elif not computes[node]:
                self._finish_beside(node, now)
            elif self.paces is None or self.paces.is_current(self.rank[node], node, now):
                self._finish_compute(node, now)
        stuck = self._find_stuck()
        if stuck:
            raise StuckError(stuck)
        return self._trace()

    def _advance(self, rank: int, now: float, cause: int | None) -> None:
        """Walk down a rank's list until it must wait."""
        node, last = self.position[rank], self.last_position[rank]
        while node < last and not self.computes[node]:
            if self.nodes[node].kind in RECEIVES:
                self._post(node, now, cause)
            else:
                self._issue(node, now, cause)
            node += 1
        self.position[rank] = node
        if node == last:
            return
        for need in self.before[node]:
            if self.end[need] is None:
                self.waiting.setdefault(need, []).append(rank)
                return
        self.start[node] = now
        self.after[node] = cause
        seconds = self.prices.seconds(self.nodes[node], rank)
        self._push(now + seconds if self.paces is None else self.paces.start(rank, node, now, seconds), node)

    def _push(self, time: float, node: int) -> None:
        """Add an event to the heap. Simultaneous events are handled in the order of their addition."""
        self.num_events += 1
        heappush(self.events, (time, self.num_events, node))

    def _finish_compute(self, node: int, now: float) -> None:
        self.end[node] = now
        rank = self.rank[node]
        self.position[rank] = node + 1
        if self.paces is not None:
            self.paces.finish(rank)
        self._advance(rank, now, node)
        if node in self.waiting:
            self._wake(node, now, node)

    def _post(self, node: int, now: float, cause: int | None) -> None:
        """Post a receive. If its send was issued already, the transfer may start now."""
        self.start[node] = now
        send = self.before[node][0]
        self.receive_of[send] = node
        queue = self.queue_of[send]
        if queue is not None:
            self._start_next(queue, now, cause)

    def _issue(self, node: int, now: float, cause: int | None) -> None:
        """Issue an instruction that runs beside computation."""
        if self.nodes[node].kind in _INSTANT:
            self.start[node] = self.end[node] = now
            self.after[node] = cause
            return
        queue = self.queue_of[node] = self._get_queue(node)
        queue.waiting.append(node)
        self._start_next(queue, now, cause)

    def _get_queue(self, node: int) -> _Queue:
        """Return the queue of a node: for a send the link to the target rank, otherwise its lane on its own rank."""
        instruction, rank = self.nodes[node], self.rank[node]
        if instruction.kind in SENDS and instruction.peer is not None:
            return self.queues[rank, self.schedule.placement.ranks[instruction.peer]]
        return self.queues[rank, self.lane[node]]

    def _start_next(self, queue: _Queue, now: float, cause: int | None) -> None:
        """Start nodes from the front of a queue, as long as the lane is free and the first has all its needs."""
        while queue.waiting and not queue.busy:
            node = queue.waiting[0]
            for need in self.before[node]:
                if self.end[need] is None:
                    self.waiting.setdefault(need, []).append(~node)
                    return
            receive = self.receive_of[node]
            if receive is not None:
                seconds, occupied = self.prices.hop_seconds(self.nodes[node], self.rank[node], self.rank[receive])
            elif self.nodes[node].kind not in SENDS:
                seconds = occupied = self.prices.seconds(self.nodes[node], self.rank[node])
            else:
                return  # The receive is not posted yet; `_post` tries again.
            queue.waiting.popleft()
            self.start[node] = now
            self.after[node] = cause
            if now + seconds > queue.last_end:
                queue.last_end = now + seconds
            self._push(queue.last_end, node)
            if occupied > 0:
                queue.busy = True
                self._push(now + occupied, ~node)
            if self.paces is not None and queue.last_end > now:
                self._change_pace(node, now, +1)

    def _free_lane(self, node: int, now: float) -> None:
        queue = self._get_queue(node)
        queue.busy = False
        self._start_next(queue, now, node)

    def _finish_beside(self, node: int, now: float) -> None:
        self.end[node] = now
        if self.paces is not None and now > self.start[node]:
            self._change_pace(node, now, -1)
        receive = self.receive_of[node]
        if receive is None:
            self._wake(node, now, node)
        else:  # Readers of a value wait for its receive, never for its send.
            self.end[receive] = now
            self.after[receive] = node
            self._wake(receive, now, node)

    def _wake(self, node: int, now: float, cause: int) -> None:
        for waiter in self.waiting.pop(node, ()):
            if waiter >= 0:
                self._advance(waiter, now, cause)
            else:
                self._start_next(self._get_queue(~waiter), now, cause)

    def _change_pace(self, node: int, now: float, change: int) -> None:
        """Change the pace of computation on both ranks of a transfer that begins or ends."""
        assert self.paces is not None, "pace changes only where transfers slow compute"
        receive = self.receive_of[node]
        touched = {self.rank[node]} if receive is None else {self.rank[node], self.rank[receive]}
        for end, computed in self.paces.change(touched, now, change):
            self._push(end, computed)

    def _find_stuck(self) -> dict[int, int]:
        """Return, for each rank that did not finish, its current node and the first node that it waits for."""
        stuck = {}
        for rank in range(self.schedule.num_ranks):
            node = self.position[rank]
            if node < self.last_position[rank]:
                stuck[node] = next(need for need in self.before[node] if self.end[need] is None)
        return stuck

    def _trace(self) -> Trace:
        """Build the trace column by column: a million Python calls would take a good part of a second."""
        unfinished = [node for node, end in enumerate(self.end) if end is None]
        assert not unfinished, f"{self.nodes[unfinished[0]]} never ended"
        held = list(map(self.prices.held, self.nodes))
        columns = (
            _texts(self.needs),
            self.rank,
            self.lane,
            self.start,
            self.end,
            [instruction.stage for instruction in self.nodes],
            [instruction.microbatch for instruction in self.nodes],
            [at_start for at_start, _ in held],
            [at_end for _, at_end in held],
            self.after,
            _peer_ranks(self.needs),
        )
        # The same as `Event._make`, without a Python call for each event: a quarter faster.
        events = tuple(map(partial(tuple.__new__, Event), zip(*columns, strict=True)))
        return Trace(name=self.schedule.name, num_ranks=self.schedule.num_ranks, events=events)


def _texts(needs: Needs) -> list[str]:
    """Return the text of each node. Nodes that differ only in their microbatch share the rest of the text."""
    texts = [""] * len(needs.nodes)
    for (kind, stage, peer), (nodes, microbatches) in needs.alike.items():
        head = f"{stage}{kind}"
        tail = str(Instruction(kind, stage, 0, peer)).removeprefix(f"{head}0")
        for node, microbatch in zip(nodes, microbatches, strict=True):
            texts[node] = f"{head}{microbatch}{tail}"
    for node in chain.from_iterable(pairs.nodes for pairs in needs.beside.values()):
        texts[node] = str(needs.nodes[node])
    return texts


def _peer_ranks(needs: Needs) -> list[int | None]:
    """Return the other rank of each node that sends or receives."""
    ranks: list[int | None] = [None] * len(needs.nodes)
    for (kind, _, peer), (nodes, _) in needs.alike.items():
        if peer is not None and kind is not Kind.REDUCE:
            rank = needs.schedule.placement.ranks[peer]
            for node in nodes:
                ranks[node] = rank
    return ranks
