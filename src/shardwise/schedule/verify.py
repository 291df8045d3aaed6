"""Proves, before anything runs, that a schedule can run and does what it should.

It checks that every instruction is about a stage of its rank; that each microbatch goes forward and backward through
each of its stages once; that each value is made before it is used; that sends and receives of a link match in order;
that in-order ranks with such links cannot wait for each other; that tied weights meet in one reduction before they take
a step; that gathered parameters are there when they are used; and that no rank holds more than it may. What fails is
named with its rank, instruction and reason, and drawn with the place marked.
"""

from collections.abc import Iterator, Sequence

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import RECEIVES, SENDS, Instruction, Kind, text_of
from shardwise.schedule.needs import Needs
from shardwise.schedule.prices import activations, free
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import Stuck, play
from shardwise.units import format_number

_COMPUTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_SHOWN_BEFORE, _SHOWN_BEHIND = 5, 4


class InvalidScheduleError(ShardwiseError):
    """A schedule that must not run. `places` are the (rank, position) that are at fault, which its drawing marks."""

    def __init__(
        self, schedule: Schedule, places: Sequence[tuple[int, int]], problem: str, *, remedy: str | None = None
    ) -> None:
        drawing = "\n".join(f"    {line}" for line in draw_places(schedule, places))
        super().__init__(f"{problem}\n{drawing}" if places else problem, remedy=remedy)
        self.places = tuple(places)



def verify(schedule: Schedule, *, memory: Sequence[float] | None = None, kept_for_weights: float = 1.0) -> None:
    """Raise `InvalidScheduleError` unless the schedule can run. `memory[rank]` is in microbatch-stages."""
    for places, problem, remedy in _problems(schedule):
        raise InvalidScheduleError(schedule, places, problem, remedy=remedy)
    if memory is not None:
        _check_memory(schedule, memory, kept_for_weights)


_Problem = tuple[list[tuple[int, int]], str, str | None]


def _problems(schedule: Schedule) -> Iterator[_Problem]:
    """Everything that is wrong, the simplest first. Each check may rely on those before it."""
    yield from _misplaced(schedule)
    needs = Needs(schedule)
    yield from _repeated(needs)
    yield from _undone(needs)
    yield from _unmade(needs)
    yield from _too_late(needs)
    yield from _crossed_links(needs)
    yield from _deadlock(needs)
    yield from _untied(needs)
    yield from _not_gathered(schedule)


def _misplaced(schedule: Schedule) -> Iterator[_Problem]:
    placement = schedule.placement
    for rank, order in enumerate(schedule.orders):
        for position, instruction in enumerate(order):
            for part in instruction.parts:
                stage = part.stage
                place = [(rank, position)]
                if stage >= placement.num_stages:
                    yield place, f"rank {rank}: {part} names stage {stage} of {placement.num_stages}", None
                elif placement.ranks[stage] != rank:
                    home = placement.ranks[stage]
                    yield place, f"rank {rank}: {part} is of stage {stage}, which lies on rank {home}", f"rank {home}"
                elif (reason := _wrong_number(part, schedule)) is not None:
                    yield place, f"rank {rank}: {part} {reason}", None


def _wrong_number(part: Instruction, schedule: Schedule) -> str | None:
    """Why an instruction's microbatch, step or peer cannot be."""
    placement, kind = schedule.placement, part.kind
    if kind in (Kind.STEP, Kind.REDUCE):
        if part.microbatch >= schedule.num_steps:
            return f"is of step {part.microbatch}, but there are {schedule.num_steps} steps"
        if part.peer is not None and (part.peer >= len(placement.ties) or part.stage not in placement.ties[part.peer]):
            return f"names tie {part.peer}, to which stage {part.stage} does not belong"
        return None
    if kind in (Kind.GATHER, Kind.RELEASE):
        return None
    if part.microbatch >= schedule.total_microbatches:
        return f"is of microbatch {part.microbatch}, but there are {schedule.total_microbatches}"
    if part.stage not in placement.pipe(part.microbatch):
        return f"is of microbatch {part.microbatch}, which does not go through stage {part.stage}"
    to_targets = kind in (Kind.SEND_F, Kind.RECV_B)
    neighbours = placement.targets[part.stage] if to_targets else placement.sources[part.stage]
    if part.peer is not None and part.peer not in neighbours:
        return f"names stage {part.peer}, but no value goes between stages {part.stage} and {part.peer} that way"
    return None


def _place(needs: Needs, node: int) -> tuple[int, int]:
    rank = needs.rank[node]
    return rank, node - needs.first_node[rank]


def _repeated(needs: Needs) -> Iterator[_Problem]:
    for node, earlier in needs.repeated:
        places = [_place(needs, earlier), _place(needs, node)]
        text = text_of(needs.nodes[node])
        yield places, f"rank {needs.rank[node]}: {text} does again what {needs.nodes[earlier]} has done", f"drop {text}"


def _undone(needs: Needs) -> Iterator[_Problem]:
    schedule, done = needs.schedule, {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient"}
    for microbatch in range(schedule.total_microbatches):
        for stage in schedule.placement.pipe(microbatch):
            for kind, what in done.items():
                if needs.find(kind, stage, microbatch) is None:
                    missing = text_of(Instruction(kind, stage, microbatch))
                    rank = schedule.placement.ranks[stage]
                    problem = f"rank {rank}: the {what} of microbatch {microbatch} on stage {stage} is never computed"
                    yield [], problem, f"{missing} in the line of rank {rank}"


def _unmade(needs: Needs) -> Iterator[_Problem]:
    for node, wanted in needs.missing:
        rank = needs.rank[node]
        where = needs.schedule.placement.ranks[wanted.stage]
        yield (
            [_place(needs, node)],
            f"rank {rank}: {needs.nodes[node]} needs {wanted}, which no rank does",
            f"{wanted} in the line of rank {where}",
        )
    if needs.schedule.communicates:
        received = {needs.before[node][0] for node, each in enumerate(needs.nodes) if each.kind in RECEIVES}
        for node, each in enumerate(needs.nodes):
            if each.kind in SENDS and node not in received:
                kind = Kind.RECV_F if each.kind is Kind.SEND_F else Kind.RECV_B
                assert each.peer is not None, f"{each} names no peer"
                receive = Instruction(kind, each.peer, each.microbatch, each.stage)
                rank = needs.schedule.placement.ranks[each.peer]
                problem = f"rank {needs.rank[node]}: {each} is never received"
                yield [_place(needs, node)], problem, f"{receive} in the line of rank {rank}"


def _too_late(needs: Needs) -> Iterator[_Problem]:
    for node, before in enumerate(needs.before):
        for need in before:
            if need > node and needs.rank[need] == needs.rank[node]:
                places = [_place(needs, node), _place(needs, need)]
                first, second = needs.nodes[need], needs.nodes[node]
                problem = f"rank {needs.rank[node]}: {second} needs {first}, which comes only after it"
                yield places, problem, f"{first} before {second}"


def _crossed_links(needs: Needs) -> Iterator[_Problem]:
    """Sends and receives of one link must match in order: what is sent first is received first."""
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    for node, each in enumerate(needs.nodes):
        if each.kind in RECEIVES:
            send = needs.before[node][0]
            receives.setdefault((needs.rank[send], needs.rank[node]), []).append(send)
        elif each.kind in SENDS and each.peer is not None:
            sends.setdefault((needs.rank[node], needs.schedule.placement.ranks[each.peer]), []).append(node)
    for (source, target), order in sends.items():
        for sent, expected in zip(order, receives.get((source, target), ()), strict=False):
            if sent != expected:
                problem = (
                    f"ranks {source} and {target}: {needs.nodes[sent]} is sent where {needs.nodes[expected]} is "
                    f"to be received, and a link keeps its order"
                )
                yield [_place(needs, sent), _place(needs, expected)], problem, "receives in the order of their sends"


def _deadlock(needs: Needs) -> Iterator[_Problem]:
    try:
        play(needs.schedule, free())
    except Stuck as stuck:
        waits = [
            f"rank {needs.rank[node]} stands at {needs.nodes[node]} and waits for {needs.nodes[need]} "
            f"of rank {needs.rank[need]}"
            for node, need in stuck.waiting.items()
        ]
        places = [_place(needs, node) for node in stuck.waiting]
        yield places, "ranks wait for each other: " + "; ".join(waits), "one of these instructions earlier"


def _untied(needs: Needs) -> Iterator[_Problem]:
    schedule = needs.schedule
    for node, instruction in enumerate(needs.nodes):
        if instruction.kind is not Kind.STEP:
            continue
        for number, tie in enumerate(schedule.placement.ties):
            if instruction.stage not in tie:
                continue
            reduction = needs.find(Kind.REDUCE, instruction.stage, instruction.microbatch, number)
            if reduction is None or reduction > node:
                wanted = Instruction(Kind.REDUCE, instruction.stage, instruction.microbatch, number)
                others = " and ".join(str(stage) for stage in tie if stage != instruction.stage)
                problem = (
                    f"rank {needs.rank[node]}: {instruction} steps on weights shared with stage {others} before their "
                    f"gradients have met"
                )
                yield [_place(needs, node)], problem, f"{wanted} before {instruction}"


def _not_gathered(schedule: Schedule) -> Iterator[_Problem]:
    for rank, order in enumerate(schedule.orders):
        sharded = {each.stage for each in order if each.kind is Kind.GATHER}
        gathered: dict[int, int] = {}
        for position, instruction in enumerate(order):
            kind, stage, number, _, _ = instruction
            place = [(rank, position)]
            if kind is Kind.GATHER:
                if stage in gathered:
                    yield place, f"rank {rank}: {instruction} gathers stage {stage}, which is gathered already", None
                gathered[stage] = number
            elif kind is Kind.RELEASE:
                if gathered.pop(stage, None) != number:
                    yield place, f"rank {rank}: {instruction} releases what is not gathered", f"{stage}GATHER{number}"
            for part in instruction.parts:
                if part.kind in _COMPUTED and part.stage in sharded and part.stage not in gathered:
                    problem = f"rank {rank}: {part} computes with the parameters of stage {part.stage}, which are not here"
                    yield place, problem, f"a GATHER of stage {part.stage} before {part}"


def peak_held(schedule: Schedule, rank: int, kept_for_weights: float = 1.0) -> tuple[float, int]:
    """The most microbatch-stages that a rank comes to hold, and the position where it first does.

    The order alone decides this: computation of a rank runs in order. An offload counts from its place on.
    """
    held = activations(schedule.placement, kept_for_weights)
    now, most, where = 0.0, 0.0, 0
    for position, instruction in enumerate(schedule.orders[rank]):
        at_start, at_end = held(instruction)
        now += at_start
        if now > most + 1e-9:
            most, where = now, position
        now += at_end
    return most, where


def _check_memory(schedule: Schedule, memory: Sequence[float], kept_for_weights: float) -> None:
    peaks = [peak_held(schedule, rank, kept_for_weights) for rank in range(schedule.num_ranks)]
    for rank, ((most, position), limit) in enumerate(zip(peaks, memory, strict=True)):
        if most > limit + 1e-9:
            fullest = max(peak for peak, _ in peaks)
            problem = (
                f"{schedule.name} holds {format_number(most)} microbatch-stages on rank {rank} at "
                f"{schedule.orders[rank][position]}, but may hold {format_number(limit)} "
                f"({format_number(most - limit)} too many)"
            )
            remedy = f"--memory {format_number(fullest)}, or auto, which makes a schedule for the memory there is"
            raise InvalidScheduleError(schedule, [(rank, position)], problem, remedy=remedy)


def draw_places(schedule: Schedule, places: Sequence[tuple[int, int]]) -> list[str]:
    """Draw the orders around the places at fault, with those in brackets. Other ranks are drawn from their start."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        marked = [position for where, position in places if where == rank]
        if not marked and schedule.num_ranks > 16:
            continue
        start = max(0, min(marked) - _SHOWN_BEFORE) if marked else 0
        stop = (max(marked) if marked else _SHOWN_BEFORE) + 1 + _SHOWN_BEHIND
        words = [f"[{each}]" if position in marked else str(each) for position, each in enumerate(order)]
        shown = words[start:stop]
        if len(shown) > 24:
            shown = [*shown[:12], "...", *shown[-12:]]
        text = " ".join(["..."] * (start > 0) + shown + ["..."] * (stop < len(words)))
        lines.append(f"rank {rank}  {text}")
    return lines
