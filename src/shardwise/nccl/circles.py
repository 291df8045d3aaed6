"""Deadlock detection: no cycle of operations in which ranks wait for each other.

The worst behaviour that NCCL and torch allow is assumed:

    an operation     starts when it is issued and all earlier ones on its communicator are complete, and is complete
                     when all of its ranks have started it
    a collective     starts when the rank's previous collective, on any communicator, is complete: a device need not
                     run two at a time, so all ranks must issue them in one order
    a wait           blocks the host, not only a stream, as reading a value would. A query whether something is
                     complete never blocks, whatever its answer
    the first        operation on a communicator blocks the host until all of its ranks are there: NCCL connects them
    a group          is created by all ranks of the world together

Links between stages are communicators of their own, with one stream each, and run concurrently with everything else.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from shardwise.nccl.matching import by_line, transfers_of
from shardwise.nccl.program import ENDS, Event, Kind, Problem, Program

#: A node of the dependency graph: the host reaches an event, it starts on the device, or it is complete there; with the
#: rank, and the index of the event in its program.
Node = tuple[str, int, int]
_HOST, _BEGUN, _OVER = "host", "begun", "over"


def circles(programs: Sequence[Program]) -> Iterator[Problem]:
    """Yield one cycle in which ranks wait for each other, if there is any. Programs must match."""
    before = _relation(programs)
    stuck = _never(before)
    if stuck:
        yield _told(programs, _circle(before, stuck))


def _relation(programs: Sequence[Program]) -> dict[Node, list[Node]]:
    """Return the predecessors of every node."""
    before: dict[Node, list[Node]] = {}
    places: dict[tuple[int, int], int] = {}
    for program in programs:
        _order(program, before, places)
    for rank, place, others in _counterparts(programs):
        before[_OVER, rank, place] += [(_BEGUN, other, there) for other, there in others]
    for together in _first_on_each(programs):
        for rank, place in together:
            before[_HOST, rank, place + 1] += [(_HOST, other, there) for other, there in together]
    return before


def _order(program: Program, before: dict[Node, list[Node]], places: dict[tuple[int, int], int]) -> None:
    """Add the order of one rank's events, on its host, its communicators and its device."""
    rank = program.rank
    last: dict[object, Node] = {}
    before[_HOST, rank, 0] = []
    for place, event in enumerate(program.events):
        host = before.setdefault((_HOST, rank, place + 1), [(_HOST, rank, place)])
        operation = event.operation
        if event.kind is Kind.ISSUE and operation is not None:
            begun: list[Node] = [(_HOST, rank, place)]
            over: Node = (_OVER, rank, place)
            places[rank, event.number] = place
            if not operation.on_host:
                queues: list[object] = [operation.communicator]
                if operation.kind not in ("send", "receive"):
                    queues.append("collectives")
                begun += [last[queue] for queue in queues if queue in last]
                last.update(dict.fromkeys(queues, over))
            before[_BEGUN, rank, place] = begun
            before[over] = [(_BEGUN, rank, place)]
        elif event.kind is Kind.WAIT and (rank, event.number) in places:
            host.append((_OVER, rank, places[rank, event.number]))


def _places(programs: Sequence[Program]) -> dict[int, int]:
    """Return the index of each event in its program, by the event's `id`."""
    return {id(event): place for program in programs for place, event in enumerate(program.events)}


def _counterparts(programs: Sequence[Program]) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield each operation of a rank, with the operations that it needs in order to complete."""
    place_of = _places(programs)
    for ranks in by_line(programs).values():
        for together in zip(*ranks.values(), strict=False):
            found = [(rank, place_of[id(event)]) for rank, event in zip(ranks, together, strict=True)]
            for rank, place in found:
                yield rank, place, found
    lines = {
        (event.operation.communicator, event.operation.on_host)
        for program in programs
        for event in program.issued
        if event.operation is not None and event.operation.transfers
    }
    for line in sorted(lines):
        sends, receives = transfers_of(programs, line)
        for (source, target, tag), mine in sends.items():
            for (sent, _), (received, _) in zip(mine, receives.get((source, target, tag), []), strict=False):
                yield source, place_of[id(sent)], [(target, place_of[id(received)])]
                yield target, place_of[id(received)], [(source, place_of[id(sent)])]


def _first_on_each(programs: Sequence[Program]) -> Iterator[list[tuple[int, int]]]:
    """Yield events that block ranks together: the first operation on each NCCL communicator, and each new group."""
    made = defaultdict[int, list[tuple[int, int]]](list)
    first = defaultdict[int, dict[int, int]](dict)
    for program in programs:
        count = 0
        for place, event in enumerate(program.events):
            if event.kind is Kind.MAKE:
                made[count].append((program.rank, place))
                count += 1
            elif event.kind is Kind.ISSUE and event.operation is not None and not event.operation.on_host:
                first[event.operation.communicator].setdefault(program.rank, place)
    for together in made.values():
        if len(together) == len(programs):
            yield together
    for by_rank in first.values():
        yield list(by_rank.items())


def _never(before: dict[Node, list[Node]]) -> set[Node]:
    """Return the nodes that are never reached."""
    left = {node: len(needed) for node, needed in before.items()}
    behind = defaultdict[Node, list[Node]](list)
    for node, needed in before.items():
        for each in needed:
            behind[each].append(node)
    ready = deque(node for node, count in left.items() if not count)
    while ready:
        node = ready.popleft()
        del left[node]
        for each in behind[node]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    return set(left)


def _circle(before: dict[Node, list[Node]], stuck: set[Node]) -> list[Node]:
    """Return a cycle: nodes that each wait for the next, and the last for the first."""
    node = min(stuck, key=lambda each: each[2])
    path: dict[Node, None] = {}
    while node not in path:
        path[node] = None
        node = next(each for each in before[node] if each in stuck)
    seen = list(path)
    return seen[seen.index(node) :]


def _told(programs: Sequence[Program], circle: Sequence[Node]) -> Problem:
    parts: list[str] = []
    lines: list[str] = []
    ranks: list[int] = []
    for kind, rank, place in circle:
        event = programs[rank].events[place - 1 if kind == _HOST else place]
        if kind == _BEGUN or (kind == _HOST and event.kind not in (*ENDS, Kind.ISSUE, Kind.MAKE)):
            continue
        told = f"rank {rank} {_does(programs[rank], event, kind)}"
        if told not in parts:
            parts.append(told)
            ranks.append(rank)
            lines += [event.line] if event.line and event.line not in lines else []
    named = tuple(sorted(set(ranks)))
    who = (
        f"rank {named[0]} waits for itself"
        if len(named) == 1
        else f"ranks {' '.join(map(str, named))} wait in a circle"
    )
    return Problem(
        kind="circle",
        ranks=named,
        sentence=f"{who}: " + ", which comes after: ".join(parts),
        look=", ".join(lines[:4]) or "the order in which these are issued",
    )


def _does(program: Program, event: Event, kind: str) -> str:
    issued = event
    if event.kind in ENDS:
        issued = next(each for each in program.events if each.kind is Kind.ISSUE and each.number == event.number)
    if event.kind is Kind.MAKE:
        return f"makes {event.communicator} {event.where}"
    assert issued.operation is not None, "an issue has an operation"
    what = f"{issued.operation} on {program.communicator(issued.operation.communicator)} {event.where}"
    if event.kind in ENDS:
        return f"waits for {what}"
    return f"ends {what}" if kind == _OVER else f"issues {what}"
