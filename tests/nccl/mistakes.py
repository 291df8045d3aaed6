"""Mistakes that somebody could make, each made in what was recorded of a plan: the checker must find all of them.

A mistake takes the programs of all ranks and returns others. What it looks for is there in every recording of its plan:
else it is no mistake, and says so.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardwise.nccl.program import ENDS, TOUCHES, Event, Kind, Operation, Program, Span

Programs = list[Program]
Wanted = Callable[[Event], bool]

#: What is recorded: model and plan, by what it has.
PLANS = {
    "shards": ("tied", "dp=2,zero=3,microbatches=2"),
    "sums": ("untied", "dp=2,zero=1,microbatches=2"),
    "pipeline": ("tied", "pp=2,microbatches=2"),
    "both ways": ("tied", "pp=2,schedule=dualpipe,microbatches=4"),
    "ring": ("tied", "cp=2"),
    "experts": ("experts", "dp=2,ep=2"),
    "host": ("tied", "cp=2,zero=2,offload.parameters=1,offload.optimizer=1"),
    "grid": ("tied", "dp=2,tp=2,sp=true,zero=1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """`finds` are the kinds of problem of which at least one must be told."""

    name: str
    plan: str
    finds: tuple[str, ...]
    make: Callable[[Programs], Programs]


MISTAKES: list[Mistake] = []


def mistake(name: str, plan: str, *finds: str) -> Callable[[Callable[[Programs], Programs]], Any]:
    def enter(make: Callable[[Programs], Programs]) -> Any:
        MISTAKES.append(Mistake(name=name, plan=plan, finds=finds, make=make))
        return make

    return enter


def is_issue(kind: str, *, step: int | None = 1, on_host: bool = False) -> Wanted:
    """An operation of a kind in a step."""

    def wanted(event: Event) -> bool:
        operation = event.operation
        if operation is None or event.kind is not Kind.ISSUE or event.step != step:
            return False
        return operation.kind == kind and operation.on_host is on_host

    return wanted


def place(program: Program, wanted: Wanted, nth: int = 0) -> int:
    return [number for number, event in enumerate(program.events) if wanted(event)][nth]


def is_wait(number: int) -> Wanted:
    return lambda event: event.kind in ENDS and event.number == number


def with_events(programs: Programs, rank: int, events: Iterable[Event]) -> Programs:
    return [replace(each, events=tuple(events)) if each.rank == rank else each for each in programs]


def without(programs: Programs, rank: int, wanted: Wanted) -> Programs:
    events = programs[rank].events
    left = [event for event in events if not wanted(event)]
    assert len(left) < len(events), "there is something to leave out"
    return with_events(programs, rank, left)


def moved(programs: Programs, rank: int, source: int, target: int) -> Programs:
    """One event to where another is."""
    events = list(programs[rank].events)
    events.insert(target, events.pop(source))
    return with_events(programs, rank, events)


def swapped(programs: Programs, rank: int, one: int, other: int) -> Programs:
    """Two operations in each other's place; whoever waits for one still waits for it."""
    events = list(programs[rank].events)
    events[one], events[other] = events[other], events[one]
    return with_events(programs, rank, events)


def changed(programs: Programs, rank: int, at: int, **fields: Any) -> Programs:
    """An operation with other fields."""
    events = list(programs[rank].events)
    operation = events[at].operation
    assert operation is not None, "an issue has an operation"
    events[at] = replace(events[at], operation=replace(operation, **fields))
    return with_events(programs, rank, events)


def transfer_changed(programs: Programs, rank: int, at: int, which: int = 0, **fields: Any) -> Programs:
    operation = programs[rank].events[at].operation
    assert operation is not None, "an issue has an operation"
    parts = list(operation.transfers)
    parts[which] = replace(parts[which], **fields)
    return changed(programs, rank, at, transfers=tuple(parts))


def dropped(programs: Programs, rank: int, at: int) -> Programs:
    """An operation that is never issued, with all that waits for it."""
    number = programs[rank].events[at].number
    return without(programs, rank, lambda event: event.number == number)


def touched(programs: Programs, rank: int, at: int, kind: Kind, *, writes: bool | None = None) -> Programs:
    """The memory of an operation touched right behind it."""
    event = programs[rank].events[at]
    assert event.operation is not None, "an issue has an operation"
    spans = [each for each in event.operation.spans if writes is None or each.writes is writes]
    touch = Event(
        kind=kind, number=event.number, spans=(replace(spans[0], writes=False),), step=event.step, at=event.at
    )
    events = list(programs[rank].events)
    events.insert(at + 1, touch)
    return with_events(programs, rank, events)


def is_touch_of(number: int) -> Wanted:
    return lambda event: event.kind in TOUCHES and event.number == number


def used_operation(programs: Programs, rank: int, wanted: Wanted) -> tuple[int, int, int]:
    """An operation whose result is waited for and then touched: the places of the three."""
    events = programs[rank].events
    for at, event in enumerate(events):
        if not wanted(event):
            continue
        waits = [number for number, each in enumerate(events) if is_wait(event.number)(each)]
        touches = [number for number, each in enumerate(events) if is_touch_of(event.number)(each)]
        if waits and touches and waits[0] < touches[0]:
            return at, waits[0], touches[0]
    raise AssertionError("no such operation is waited for and used")


def unwaited(programs: Programs, rank: int, wanted: Wanted) -> Programs:
    """An operation that is used, and that nobody waits for."""
    at, _, _ = used_operation(programs, rank, wanted)
    return without(programs, rank, is_wait(programs[rank].events[at].number))


# ---------------------------------------------------------------------------------------------------------------------
# Collectives that are not the same on all ranks.


@mistake("two collectives of a communicator, issued in another order on one rank", "shards", "order", "size")
def _(programs: Programs) -> Programs:
    rank = programs[1]
    return swapped(programs, 1, place(rank, is_issue("all_gather")), place(rank, is_issue("reduce_scatter")))


@mistake("two reduce-scatters of buckets of different sizes, issued in another order on one rank", "shards", "size")
def _(programs: Programs) -> Programs:
    places = [number for number, event in enumerate(programs[0].events) if is_issue("reduce_scatter")(event)]
    counts = [_operation(programs[0].events[each]).count for each in places]
    other = next(each for each, count in zip(places, counts, strict=True) if count != counts[0])
    return swapped(programs, 0, places[0], other)


@mistake("two reduce-scatters of one size, for two buckets, issued in another order on one rank", "sums", "purpose")
def _(programs: Programs) -> Programs:
    places = [number for number, event in enumerate(programs[1].events) if is_issue("reduce_scatter")(event)]
    for one in places:
        for other in places:
            mine, theirs = (_operation(programs[1].events[each]) for each in (one, other))
            if mine.count == theirs.count and mine.carries != theirs.carries:
                return swapped(programs, 1, one, other)
    raise AssertionError("no two buckets have one size")


@mistake("a gather that one rank leaves out", "shards", "missing", "order", "size", "purpose")
def _(programs: Programs) -> Programs:
    return dropped(programs, 1, place(programs[1], is_issue("all_gather")))


@mistake("the last collective of a run, left out by one rank", "sums", "missing")
def _(programs: Programs) -> Programs:
    numbers = [n for n, e in enumerate(programs[1].events) if e.operation is not None and not e.operation.on_host]
    return dropped(programs, 1, numbers[-1])


@mistake("a reduce-scatter that one rank issues twice", "sums", "size", "order", "missing", "purpose")
def _(programs: Programs) -> Programs:
    at = place(programs[0], is_issue("reduce_scatter"))
    events = list(programs[0].events)
    events[at + 1 : at + 1] = [replace(events[at], number=10**6), Event(kind=Kind.WAIT, number=10**6, step=1)]
    return with_events(programs, 0, events)


@mistake("a gather with one element more on one rank", "shards", "size")
def _(programs: Programs) -> Programs:
    at = place(programs[1], is_issue("all_gather"))
    return changed(programs, 1, at, count=_operation(programs[1].events[at]).count + 1)


@mistake("a reduce-scatter in bf16 on one rank", "sums", "type")
def _(programs: Programs) -> Programs:
    return changed(programs, 1, place(programs[1], is_issue("reduce_scatter")), dtype="bfloat16")


@mistake("a maximum in place of a sum as the reduction on one rank", "sums", "reduction")
def _(programs: Programs) -> Programs:
    return changed(programs, 0, place(programs[0], is_issue("reduce_scatter")), reduction="max")


@mistake("an all-reduce in place of a reduce-scatter on one rank", "sums", "order")
def _(programs: Programs) -> Programs:
    return changed(programs, 1, place(programs[1], is_issue("reduce_scatter")), kind="all_reduce")


@mistake("a gather on another communicator of the same ranks", "shards", "missing", "order", "size", "purpose")
def _(programs: Programs) -> Programs:
    at = place(programs[1], is_issue("all_gather"))
    mine = _operation(programs[1].events[at]).communicator
    other = next(
        each.number for each in programs[1].communicators if each.backend == "nccl" and each.number not in (0, mine)
    )
    return changed(programs, 1, at, communicator=other)


@mistake("a rank that uses a communicator to which it does not belong", "grid", "member")
def _(programs: Programs) -> Programs:
    at = place(programs[3], is_issue("all_gather"))
    other = next(each.number for each in programs[3].communicators if 3 not in each.members and 0 in each.members)
    return changed(programs, 3, at, communicator=other)


@mistake("a rank of a grid that is one collective behind", "grid", "order", "size", "missing")
def _(programs: Programs) -> Programs:
    return dropped(programs, 2, place(programs[2], is_issue("all_gather"), 1))


@mistake("a host all-reduce that one rank leaves out", "pipeline", "missing", "size", "type")
def _(programs: Programs) -> Programs:
    return dropped(programs, 1, place(programs[1], is_issue("all_reduce", on_host=True)))


@mistake("rows that a rank sends and nobody expects", "experts", "size")
def _(programs: Programs) -> Programs:
    at = place(programs[0], is_issue("all_to_all"), 1)
    sent = _operation(programs[0].events[at]).sent
    return changed(programs, 0, at, sent=(*sent[:-1], sent[-1] + 32))


@mistake("rows for two ranks, each sent to the other", "experts", "size")
def _(programs: Programs) -> Programs:
    at = place(
        programs[0],
        lambda event: is_issue("all_to_all")(event) and len(set(_operation(event).sent)) > 1,
    )
    return changed(programs, 0, at, sent=_operation(programs[0].events[at]).sent[::-1])


@mistake("counts of rows that one rank does not send", "experts", "order", "type", "size", "missing")
def _(programs: Programs) -> Programs:
    return dropped(programs, 1, place(programs[1], is_issue("all_to_all")))


# ---------------------------------------------------------------------------------------------------------------------
# Groups.


def makes(program: Program) -> list[int]:
    return [number for number, event in enumerate(program.events) if event.kind is Kind.MAKE]


@mistake("two groups created in another order on one rank", "grid", "groups")
def _(programs: Programs) -> Programs:
    one, other, *_ = makes(programs[2])
    return swapped(programs, 2, one, other)


@mistake("a group that a rank does not create, because it is not a member", "grid", "groups")
def _(programs: Programs) -> Programs:
    at = next(n for n in makes(programs[3]) if 3 not in _made(programs[3].events[n]).members)
    return with_events(programs, 3, [e for n, e in enumerate(programs[3].events) if n != at])


@mistake("a group that one rank creates with other members", "grid", "groups")
def _(programs: Programs) -> Programs:
    at = makes(programs[1])[0]
    events = list(programs[1].events)
    events[at] = replace(events[at], communicator=replace(_made(events[at]), members=(0, 3)))
    return with_events(programs, 1, events)


@mistake("a link that one end creates over gloo", "pipeline", "groups")
def _(programs: Programs) -> Programs:
    at = next(n for n in makes(programs[1]) if _made(programs[1].events[n]).backend == "nccl")
    events = list(programs[1].events)
    events[at] = replace(events[at], communicator=replace(_made(events[at]), backend="gloo"))
    return with_events(programs, 1, events)


@mistake("a group that one rank creates when the others already use another", "grid", "circle")
def _(programs: Programs) -> Programs:
    at = makes(programs[1])[-1]
    waits = [n for n, e in enumerate(programs[1].events) if n > at and e.kind is Kind.WAIT]
    first = next(n for n in waits if not _issue_of(programs[1], programs[1].events[n].number).on_host)
    return moved(programs, 1, at, first)


# ---------------------------------------------------------------------------------------------------------------------
# Messages.


@mistake("a message that nobody receives", "pipeline", "unmatched", "purpose")
def _(programs: Programs) -> Programs:
    return dropped(programs, 1, place(programs[1], is_issue("receive")))


@mistake("a message that nobody sends", "pipeline", "unmatched", "purpose")
def _(programs: Programs) -> Programs:
    return dropped(programs, 0, place(programs[0], is_issue("send")))


@mistake("a message to a wrong rank", "pipeline", "unmatched")
def _(programs: Programs) -> Programs:
    return transfer_changed(programs, 0, place(programs[0], is_issue("send")), peer=0)


@mistake("a message with one element less than is received", "pipeline", "size")
def _(programs: Programs) -> Programs:
    at = place(programs[0], is_issue("send"))
    count = _operation(programs[0].events[at]).transfers[0].count
    return transfer_changed(programs, 0, at, count=count - 1)


@mistake("a message in bf16 that is received in fp32", "pipeline", "type")
def _(programs: Programs) -> Programs:
    return transfer_changed(programs, 1, place(programs[1], is_issue("send")), dtype="bfloat16")


@mistake("two messages of one size, received in another order", "pipeline", "purpose")
def _(programs: Programs) -> Programs:
    return swapped(programs, 1, place(programs[1], is_issue("receive")), place(programs[1], is_issue("receive"), 1))


@mistake("a message on the link of the other direction", "pipeline", "unmatched")
def _(programs: Programs) -> Programs:
    other = _operation(programs[0].events[place(programs[0], is_issue("receive"))]).communicator
    return changed(programs, 0, place(programs[0], is_issue("send")), communicator=other)


@mistake("a header that is not sent", "pipeline", "unmatched", "purpose")
def _(programs: Programs) -> Programs:
    return dropped(programs, 0, place(programs[0], is_issue("send", step=0, on_host=True)))


@mistake("a hop of a ring in which one rank only sends", "ring", "unmatched")
def _(programs: Programs) -> Programs:
    at = place(programs[1], is_issue("batch"))
    return changed(programs, 1, at, transfers=_operation(programs[1].events[at]).transfers[:1])


@mistake("a hop of a ring to a wrong rank", "ring", "unmatched")
def _(programs: Programs) -> Programs:
    return transfer_changed(programs, 0, place(programs[0], is_issue("batch")), peer=0)


# ---------------------------------------------------------------------------------------------------------------------
# Circles.


@mistake("hops of a ring that are sent first and received afterwards, not at the same time", "ring", "circle")
def _(programs: Programs) -> Programs:
    for rank in (0, 1):
        events = list(programs[rank].events)
        at = place(programs[rank], is_issue("batch"))
        batch = _operation(events[at])
        parts = [
            replace(events[at], number=10**6 + each, operation=replace(batch, transfers=(batch.transfers[each],)))
            for each in range(2)
        ]
        wait = Event(kind=Kind.WAIT, number=10**6, step=1)
        last = Event(kind=Kind.WAIT, number=10**6 + 1, step=1)
        number = events[at].number
        events[at : at + 1] = [parts[0], wait, parts[1], last]
        events = [event for event in events if not is_wait(number)(event)]
        programs = with_events(programs, rank, events)
    return programs


def _crossed(programs: Programs, behind: Sequence[int]) -> Programs:
    """Sums over replicas and over layers, in one order on some ranks and in the other on the others."""
    for rank, program in enumerate(programs):
        names = {each.number: each.name for each in program.communicators}
        events = list(program.events)
        start = place(program, lambda event: event.step == 1)
        chosen: dict[str, Event] = {}
        for name in ("tp", "replicas"):
            model = next(e for e in events if e.operation is not None and names[e.operation.communicator] == name)
            number = 10**6 + len(chosen)
            operation = replace(
                _operation(model), kind="all_reduce", count=1, dtype="float32", reduction="sum", spans=()
            )
            chosen[name] = replace(model, number=number, operation=replace(operation, sent=(), received=()), step=1)
        order = [chosen["replicas"], chosen["tp"]] if rank in behind else [chosen["tp"], chosen["replicas"]]
        waits = [Event(kind=Kind.WAIT, number=each.number, step=1) for each in order]
        events[start:start] = [*order, *waits]
        programs = with_events(programs, rank, events)
    return programs


@mistake("two communicators in opposite order on ranks of a grid, both pending at the same time", "grid", "circle")
def _(programs: Programs) -> Programs:
    assert not _found(_crossed(programs, ())), "in one order they are right"
    return _crossed(programs, (1, 2))


@mistake("communicators connected in another order on one rank", "shards", "circle")
def _(programs: Programs) -> Programs:
    first = [n for n, e in enumerate(programs[1].events) if is_issue("all_reduce", step=None)(e)]
    one, other = first[:2]
    return moved(moved(programs, 1, other, one), 1, other + 1, one + 1)


def _is_one_of(numbers: set[int], event: Event) -> bool:
    return event.number in numbers


@mistake("links that nobody connects before the first step", "both ways", "circle")
def _(programs: Programs) -> Programs:
    for rank in (0, 1):
        for kind in ("send", "receive"):
            program = programs[rank]
            numbers = {e.number for e in program.events if is_issue(kind, step=None)(e)}
            programs = without(programs, rank, partial(_is_one_of, numbers))
    return programs


@mistake(
    "a rank that waits for a gradient before it sends the activation that the gradient is computed from",
    "pipeline",
    "circle",
)
def _(programs: Programs) -> Programs:
    receive = place(programs[0], is_issue("receive"))
    wait = place(programs[0], is_wait(programs[0].events[receive].number))
    events = programs[0].events
    sends = [event for event in events[:wait] if is_issue("send")(event)]
    others = [event for event in events[: wait + 1] if not is_issue("send")(event)]
    return with_events(programs, 0, [*others, *sends, *events[wait + 1 :]])


@mistake(
    "a rank that waits for the all-reduce of the loss before it sends the activation that the loss is computed from",
    "pipeline",
    "circle",
)
def _(programs: Programs) -> Programs:
    """The sum of the loss, asked for and waited for by the first stage before it sends anything."""
    loss = place(programs[0], is_issue("all_reduce", on_host=True))
    wait = place(programs[0], is_wait(programs[0].events[loss].number))
    send = place(programs[0], is_issue("send"))
    return moved(moved(programs, 0, loss, send), 0, wait, send + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Waits and memory.


@mistake("a gather that nobody waits for", "shards", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 0, is_issue("all_gather"))


@mistake("a reduce-scatter that nobody waits for", "shards", "use", "reuse", "freed", "unwaited")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 1, is_issue("reduce_scatter"))


@mistake("a message that is read before it is waited for", "pipeline", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 1, is_issue("receive"))


@mistake("a hop of a ring that nobody waits for", "ring", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 0, is_issue("batch"))


@mistake("rows of experts that nobody waits for", "experts", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 0, is_issue("all_to_all"))


@mistake("a reduction in a layer that nobody waits for", "grid", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 3, is_issue("reduce_scatter"))


@mistake("a host all-reduce that is read before it is waited for", "pipeline", "use", "unwaited")
def _(programs: Programs) -> Programs:
    return unwaited(programs, 0, is_issue("all_reduce", on_host=True))


@mistake("a wait after the first use", "shards", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    _, wait, touch = used_operation(programs, 0, is_issue("all_gather"))
    return moved(programs, 0, wait, touch + 1)


@mistake("a wait for another operation than the one that is used", "shards", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    at, wait, _ = used_operation(programs, 0, is_issue("all_gather"))
    before = next(e for e in programs[0].events[at - 1 :: -1] if e.kind is Kind.ISSUE)
    events = list(programs[0].events)
    events[wait] = replace(events[wait], number=before.number)
    return with_events(programs, 0, events)


@mistake("a wait on another stream than the one that computes", "shards", "use", "reuse", "freed")
def _(programs: Programs) -> Programs:
    _, wait, _ = used_operation(programs, 0, is_issue("all_gather"))
    events = list(programs[0].events)
    events[wait] = replace(events[wait], stream="side")
    return with_events(programs, 0, events)


@mistake("gradients written to while they are reduced", "sums", "reuse")
def _(programs: Programs) -> Programs:
    return touched(programs, 0, place(programs[0], is_issue("reduce_scatter")), Kind.WRITE)


@mistake("a piece of a reduction that is added to its shard before it has arrived", "shards", "use", "reuse")
def _(programs: Programs) -> Programs:
    at, wait, touch = used_operation(programs, 1, is_issue("reduce_scatter"))
    del wait
    return moved(programs, 1, touch, at + 1)


@mistake("weights freed while they are gathered", "shards", "freed")
def _(programs: Programs) -> Programs:
    return touched(programs, 0, place(programs[0], is_issue("all_gather")), Kind.FREE, writes=True)


@mistake("a shard that is updated while it is gathered", "shards", "reuse")
def _(programs: Programs) -> Programs:
    return touched(programs, 0, place(programs[0], is_issue("all_gather")), Kind.WRITE, writes=False)


@mistake("an activation freed before it is sent", "pipeline", "freed")
def _(programs: Programs) -> Programs:
    return touched(programs, 0, place(programs[0], is_issue("send")), Kind.FREE)


@mistake("an activation overwritten before it is sent", "pipeline", "reuse")
def _(programs: Programs) -> Programs:
    return touched(programs, 1, place(programs[1], is_issue("send")), Kind.WRITE)


@mistake("keys of a ring overwritten while they are sent", "ring", "reuse")
def _(programs: Programs) -> Programs:
    return touched(programs, 1, place(programs[1], is_issue("batch")), Kind.WRITE, writes=False)


@mistake("a work handle that is dropped", "sums", "unwaited")
def _(programs: Programs) -> Programs:
    numbers = [e.number for e in programs[0].events if is_issue("all_reduce")(e)]
    return without(programs, 0, is_wait(numbers[0]))


@mistake("a send that is never waited for", "pipeline", "unwaited", "freed", "reuse")
def _(programs: Programs) -> Programs:
    at = place(programs[0], is_issue("send"))
    return without(programs, 0, is_wait(programs[0].events[at].number))


@mistake("a reduce-scatter on a stream that does not wait for the computation", "sums", "stream")
def _(programs: Programs) -> Programs:
    at = place(programs[0], is_issue("reduce_scatter"))
    events = list(programs[0].events)
    events[at] = replace(events[at], stream="side")
    return with_events(programs, 0, events)


@mistake("two reductions of the same memory on two communicators, in no defined order", "grid", "reuse")
def _(programs: Programs) -> Programs:
    """Each is right on its own: the first is waited for behind the second."""
    names = {each.number: each.name for each in programs[0].communicators}
    for rank in range(4):
        events = list(programs[rank].events)
        at = place(programs[rank], is_issue("reduce_scatter"))
        other = next(number for number, name in names.items() if name == "world" and number)
        span = Span(memory=10**6, start=0, stop=4, writes=True)
        one = replace(_operation(events[at]), kind="all_reduce", count=1, spans=(span,))
        numbers = (10**6, 10**6 + 1)
        both = [replace(events[at], number=numbers[0], operation=one)]
        both.append(replace(events[at], number=numbers[1], operation=replace(one, communicator=other)))
        events[at:at] = [*both, *(Event(kind=Kind.WAIT, number=each, step=1) for each in numbers)]
        programs = with_events(programs, rank, events)
    return programs


@mistake("weights from the host that are sent before they have arrived", "host", "reuse", "use")
def _(programs: Programs) -> Programs:
    """What is computed does not follow the copy that brings what a gather sends."""
    for at, event in enumerate(programs[0].events):
        if event.operation is None or event.operation.kind != "all_gather" or event.step != 1:
            continue
        copies = [
            each.number
            for each in programs[0].events[:at]
            if each.kind is Kind.COPY and any(a.overlaps(b) for a in each.spans for b in event.operation.spans)
        ]
        if copies:
            return without(programs, 0, is_wait(copies[-1]))
    raise AssertionError("no gather sends what a copy has brought")


def _alone(programs: Programs, stream: str) -> Programs:
    """A copy that follows nothing, of a stream that has had none yet."""
    events = list(programs[0].events)
    at = place(programs[0], lambda event: event.kind is Kind.COPY and event.stream == stream and bool(event.after))
    events[at] = replace(events[at], after=())
    return with_events(programs, 0, events)


@mistake("a copy to the host that does not follow what is computed", "host", "reuse", "use")
def _(programs: Programs) -> Programs:
    return _alone(programs, "copies out")


@mistake("a copy from the host into memory that is still in use", "host", "reuse")
def _(programs: Programs) -> Programs:
    return _alone(programs, "copies in")


def _operation(event: Event) -> Operation:
    assert event.operation is not None, "an issue has an operation"
    return event.operation


def _issue_of(program: Program, number: int) -> Operation:
    found = next((e for e in program.events if e.kind is Kind.ISSUE and e.number == number), None)
    return Operation(kind="copy", communicator=0, on_host=True) if found is None else _operation(found)


def _made(event: Event) -> Any:
    assert event.communicator is not None, "a group is made"
    return event.communicator


def _found(programs: Programs) -> list[str]:
    from shardwise.nccl.check import prove

    return [each.sentence for each in prove(programs).problems]
