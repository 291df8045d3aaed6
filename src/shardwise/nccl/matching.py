"""Matching of operations over ranks: groups created in one order, equal collectives, a receive for every send.

NCCL does not check what other ranks do. A rank that is one operation ahead, or whose message has another size, takes
wrong data for the expected data, or hangs.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from shardwise.nccl.program import Communicator, Event, Kind, Operation, Problem, Program, Transfer

#: A communicator's number, and whether it is its part for host tensors.
Line = tuple[int, bool]


def mismatches(programs: Sequence[Program]) -> Iterator[Problem]:
    """Yield mismatches between ranks: for each communicator the first."""
    different = list(_groups(programs))
    yield from different
    if different:
        return  # From there on the numbers of communicators do not correspond.
    yield from _collectives(programs)
    yield from _transfers(programs)


def _groups(programs: Sequence[Program]) -> Iterator[Problem]:
    made = [[each for each in program.events if each.kind is Kind.MAKE] for program in programs]
    for program, mine in zip(programs[1:], made[1:], strict=True):
        for number, (first, other) in enumerate(zip_longest(made[0], mine), 1):
            if _group_of(first) == _group_of(other):
                continue
            if (first is None and programs[0].failure) or (other is None and program.failure):
                break  # The rank failed before.
            told = [
                f"rank {rank} makes {_told_group(event)}"
                for rank, event in ((programs[0].rank, first), (program.rank, other))
            ]
            yield Problem(
                kind="groups",
                ranks=(programs[0].rank, program.rank),
                sentence=f"group {number} of the world is not the same: {', '.join(told)}",
                look="the calls of new_group: every rank of the world makes every group, in one order, also those"
                " that it is not in",
            )
            break


def _group_of(event: Event | None) -> tuple[object, ...] | None:
    made = None if event is None else event.communicator
    return None if made is None else (made.members, made.backend)


def _told_group(event: Event | None) -> str:
    if event is None or event.communicator is None:
        return "none"
    return f"one of ranks {' '.join(map(str, event.communicator.members))} over {event.communicator.backend}"


def _collectives(programs: Sequence[Program]) -> Iterator[Problem]:
    for line, by_rank in by_line(programs).items():
        communicator = _communicator(programs, line)
        members = [rank for rank in communicator.members if rank < len(programs)]
        strangers = sorted(set(by_rank) - set(members))
        if strangers:
            event = by_rank[strangers[0]][0]
            yield _problem(
                "member", communicator, (strangers[0],),
                f"rank {strangers[0]} issues {event.operation} on {communicator}, and is not one of its ranks,"
                f" {event.where}", event,
            )  # fmt: skip
            continue
        yield from _first_difference(programs, communicator, {rank: by_rank.get(rank, []) for rank in members})


def _first_difference(
    programs: Sequence[Program], communicator: Communicator, by_rank: dict[int, list[Event]]
) -> Iterator[Problem]:
    one, *others = by_rank
    for other in others:
        for place, (mine, theirs) in enumerate(zip_longest(by_rank[one], by_rank[other])):
            if mine is None or theirs is None:
                rank, missing, event = (other, one, theirs) if mine is None else (one, other, mine)
                yield _problem(
                    "missing", communicator, (rank, missing),
                    f"rank {rank} issues {event.operation} on {communicator} {event.where}, and rank {missing} never"
                    f" does: it issues {len(by_rank[missing])} collectives there{_end_of(programs[missing])}", event,
                )  # fmt: skip
                return
            wrong = _difference(mine.operation, theirs.operation, communicator.members, one, other)
            wrong = wrong or _other_purpose(mine, theirs)
            if wrong is not None:
                kind, how = wrong
                yield _problem(
                    kind, communicator, (one, other),
                    f"collective {place} on {communicator} {how}: rank {one} issues {mine.operation} {mine.where},"
                    f" rank {other} issues {theirs.operation} {theirs.where}", mine,
                )  # fmt: skip
                return


def _difference(
    mine: Operation | None, theirs: Operation | None, members: Sequence[int], one: int, other: int
) -> tuple[str, str] | None:
    assert mine is not None, "an issue has an operation"
    assert theirs is not None, "an issue has an operation"
    if mine.kind != theirs.kind:
        return "order", "is not of one kind"
    if mine.dtype != theirs.dtype:
        return "type", "is not of one type"
    if mine.reduction != theirs.reduction:
        return "reduction", "is not one reduction"
    if mine.root != theirs.root:
        return "root", "has not one root"
    here, there = members.index(one), members.index(other)
    if mine.sent and theirs.sent:
        if mine.sent[there] != theirs.received[here] or theirs.sent[here] != mine.received[there]:
            return "size", "sends other numbers than are received"
        return None
    return ("size", "is not of one size") if mine.count != theirs.count else None


def _other_purpose(mine: Event, theirs: Event) -> tuple[str, str] | None:
    """Whether two operations of one size are for different things: each rank would take data for other data.

    Ranks of one stage run the same instructions, for the same data; those of others may be at any, and without a flush
    in another step."""
    assert mine.operation is not None, "an issue has an operation"
    assert theirs.operation is not None, "an issue has an operation"
    if _stage_of(mine.at) != _stage_of(theirs.at):
        return None
    is_alike = (mine.step, mine.at) == (theirs.step, theirs.at) and mine.operation.carries == theirs.operation.carries
    return None if is_alike else ("purpose", "is not for the same")


def _stage_of(at: str) -> str:
    """Return the stage of an instruction (`2F0`), or nothing for other places."""
    return at[: len(at) - len(at.lstrip("0123456789"))]


def _transfers(programs: Sequence[Program]) -> Iterator[Problem]:
    for line in sorted({_line_of(event.operation) for program in programs for event in program.issued}):
        communicator = _communicator(programs, line)
        sends, receives = transfers_of(programs, line)
        for source, target, tag in sorted({*sends, *receives}):
            for place, (sent, received) in enumerate(
                zip_longest(sends.get((source, target, tag), []), receives.get((source, target, tag), []))
            ):
                found = _unmatched(programs, communicator, (source, target), place, sent, received)
                if found is not None:
                    yield found
                    break


#: A transfer, and the operation that it is part of.
Part = tuple[Event, Transfer]


def transfers_of(
    programs: Sequence[Program], line: Line
) -> tuple[dict[tuple[int, int, int], list[Part]], dict[tuple[int, int, int], list[Part]]]:
    """Return the sends and the receives of a communicator, each in order of issue, by source, target and tag.

    NCCL has no tags: over NCCL the tag is always 0.
    """
    sends = defaultdict[tuple[int, int, int], list[Part]](list)
    receives = defaultdict[tuple[int, int, int], list[Part]](list)
    for program in programs:
        for event in program.issued:
            operation = event.operation
            if operation is None or _line_of(operation) != line:
                continue
            for each in operation.transfers:
                tag = each.tag if operation.on_host else 0
                if each.is_send:
                    sends[program.rank, each.peer, tag].append((event, each))
                else:
                    receives[each.peer, program.rank, tag].append((event, each))
    return sends, receives


def _unmatched(
    programs: Sequence[Program],
    communicator: Communicator,
    ends: tuple[int, int],
    place: int,
    sent: Part | None,
    received: Part | None,
) -> Problem | None:
    source, target = ends
    if sent is None or received is None:
        rank, missing, part = (target, source, received) if sent is None else (source, target, sent)
        assert part is not None, "one of the two is there"
        event, transfer = part
        does = "send" if transfer.is_send else "receive"
        answer = "receives it" if transfer.is_send else "sends it"
        return _problem(
            "unmatched", communicator, (rank, missing),
            f"{does} {place} of rank {rank} {'to' if transfer.is_send else 'from'} rank {missing} on {communicator}"
            f" ({transfer.count} {transfer.dtype}) {event.where} has no other end: rank {missing} never"
            f" {answer}{_end_of(programs[missing]) if missing < len(programs) else ''}", event,
        )  # fmt: skip
    (event, one), (other_event, other) = sent, received
    for kind, mine, theirs in (
        ("type", one.dtype, other.dtype),
        ("size", one.count, other.count),
        ("purpose", _message_of(event.at), _message_of(other_event.at)),
    ):
        if mine != theirs:
            return _problem(
                kind, communicator, ends,
                f"message {place} from rank {source} to rank {target} on {communicator}: rank {source} sends"
                f" {one.count} {one.dtype} {event.where}, rank {target} receives {other.count} {other.dtype}"
                f" {other_event.where}", event,
            )  # fmt: skip
    return None


def _message_of(at: str) -> str:
    """Return what both ends of a message between stages have in common: F1 of `0SEND_F1>1` and of `1RECV_F1<0`."""
    found = re.fullmatch(r"\d+(?:SEND|RECV)_(\w+)[<>]\d+", at)
    return "" if found is None else found[1]


def by_line(programs: Sequence[Program]) -> dict[Line, dict[int, list[Event]]]:
    """Return the collectives of each communicator, by rank, in order of issue."""
    found: dict[Line, dict[int, list[Event]]] = {}
    for program in programs:
        for event in program.issued:
            if event.operation is not None and not event.operation.transfers:
                found.setdefault(_line_of(event.operation), {}).setdefault(program.rank, []).append(event)
    return found


def _line_of(operation: Operation | None) -> Line:
    assert operation is not None, "an issue has an operation"
    return operation.communicator, operation.on_host


def _communicator(programs: Sequence[Program], line: Line) -> Communicator:
    for program in programs:
        for each in program.communicators:
            if each.number == line[0]:
                return each
    raise AssertionError(f"communicator {line[0]} was never made")


def _end_of(program: Program) -> str:
    if program.failure is None:
        return ""
    last = next((each for each in reversed(program.events) if each.kind in (Kind.ISSUE, Kind.WAIT)), None)
    return "" if last is None else f", and ended {last.where}: {program.failure}"


def _problem(kind: str, communicator: Communicator, ranks: tuple[int, ...], sentence: str, event: Event) -> Problem:
    name = communicator.name or f"communicator {communicator.number}"
    what = event.line or event.at or "the step"
    return Problem(kind=kind, ranks=ranks, sentence=sentence, look=f"{what}, and what its ranks do on {name} before")
