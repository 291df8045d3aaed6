"""One check for each way in which a schedule can be invalid, giving the places, the reason and the remedy."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.prices import free
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import StuckError, play

#: The ranks and the positions in their orders that are at fault.
Places = list[tuple[int, int]]

#: The places, what is wrong with them, and what to write instead.
Problem = tuple[Places, str, str]

_COMPUTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})


def problems(schedule: Schedule) -> Iterator[Problem]:
    """Yield all problems, the simplest first. Each check may rely on those before it."""
    yield from _misplaced(schedule)
    yield from _unnamed(schedule)
    needs = Needs(schedule)
    yield from _repeated(needs)
    yield from _undone(needs)
    yield from _unmade(needs)
    yield from _too_late(needs)
    yield from _crossed_links(needs)
    yield from _deadlock(needs)
    yield from _untied(needs)
    yield from _not_by_all(needs)
    yield from _crossed_ties(needs)
    yield from _not_gathered(schedule)


def _misplaced(schedule: Schedule) -> Iterator[Problem]:
    placement = schedule.placement
    for rank, order in enumerate(schedule.orders):
        for position, instruction in enumerate(order):
            for part in instruction.parts:
                stage = part.stage
                if stage < placement.num_stages and placement.ranks[stage] != rank:
                    problem = f"rank {rank}: {part} is of stage {stage}, which lies on rank {placement.ranks[stage]}"
                    yield [(rank, position)], problem, _in_line(part, schedule)
                elif (wrong := _wrong_number(part, schedule)) is not None:
                    remedy = f"drop {part}, or correct its numbers"
                    yield [(rank, position)], f"rank {rank}: {part} {wrong}", remedy


def _wrong_number(part: Instruction, schedule: Schedule) -> str | None:
    """Return why an instruction's stage, microbatch, step or peer is invalid; None if all are valid."""
    placement, kind = schedule.placement, part.kind
    if part.stage >= placement.num_stages:
        return f"is of stage {part.stage}, but the last is {placement.num_stages - 1}"
    if kind in (Kind.STEP, Kind.REDUCE):
        if part.microbatch >= schedule.num_steps:
            return f"is of step {part.microbatch}, but the last step is {schedule.num_steps - 1}"
        if part.peer is not None and (part.peer >= len(placement.ties) or part.stage not in placement.ties[part.peer]):
            return f"names tie {part.peer}, to which stage {part.stage} does not belong"
        return None
    if kind in (Kind.GATHER, Kind.RELEASE):
        return None
    if part.microbatch >= schedule.total_microbatches:
        return f"is of microbatch {part.microbatch}, but the last is {schedule.total_microbatches - 1}"
    if part.stage not in placement.pipe(part.microbatch):
        return f"is of microbatch {part.microbatch}, which does not go through stage {part.stage}"
    to_targets = kind in (Kind.SEND_F, Kind.RECV_B)
    neighbours = placement.targets[part.stage] if to_targets else placement.sources[part.stage]
    if part.peer is not None and part.peer not in neighbours:
        return f"names stage {part.peer}, but no value goes between stages {part.stage} and {part.peer} that way"
    return None


def _unnamed(schedule: Schedule) -> Iterator[Problem]:
    """Find microbatches without a forward. Runs before `Needs` is built: a file may declare far too many."""
    named = {each.microbatch for order in schedule.orders for each in order if each.kind is Kind.F}
    for microbatch in range(schedule.total_microbatches):
        if microbatch not in named:
            problem = f"microbatch {microbatch} never goes forward (microbatches: {schedule.total_microbatches})"
            first = schedule.placement.pipe(microbatch)[0]
            yield [], problem, _in_line(Instruction(Kind.F, first, microbatch), schedule)


def _in_line(wanted: Instruction, schedule: Schedule) -> str:
    return f"{wanted} in the line of rank {schedule.placement.ranks[wanted.stage]}"


def _place(needs: Needs, node: int) -> tuple[int, int]:
    rank = needs.rank[node]
    return rank, node - needs.first_node[rank]


def _repeated(needs: Needs) -> Iterator[Problem]:
    for node, earlier in needs.repeated:
        again, before = needs.nodes[node], needs.nodes[earlier]
        problem = f"rank {needs.rank[node]}: {again} does again what {before} has done"
        yield [_place(needs, earlier), _place(needs, node)], problem, f"drop {again}"


def _undone(needs: Needs) -> Iterator[Problem]:
    schedule, done = needs.schedule, {Kind.F: "forward", Kind.I: "input gradient", Kind.W: "weight gradient"}
    for microbatch in range(schedule.total_microbatches):
        for stage in schedule.placement.pipe(microbatch):
            for kind, what in done.items():
                if needs.find(kind, stage, microbatch) is None:
                    rank = schedule.placement.ranks[stage]
                    done_with_it = [
                        (rank, position)
                        for position, each in enumerate(schedule.orders[rank])
                        if any((part.stage, part.microbatch) == (stage, microbatch) for part in each.parts)
                    ]
                    problem = f"rank {rank}: the {what} of microbatch {microbatch} on stage {stage} is never computed"
                    yield done_with_it, problem, _in_line(Instruction(kind, stage, microbatch), schedule)


def _unmade(needs: Needs) -> Iterator[Problem]:
    for node, wanted in needs.missing:
        problem = f"rank {needs.rank[node]}: {needs.nodes[node]} needs {wanted}, which no rank does"
        yield [_place(needs, node)], problem, _in_line(wanted, needs.schedule)
    if needs.schedule.communicates:
        received = {needs.before[node][0] for node, each in enumerate(needs.nodes) if each.kind in RECEIVES}
        for node, each in enumerate(needs.nodes):
            if each.kind in SENDS and node not in received:
                kind = Kind.RECV_F if each.kind is Kind.SEND_F else Kind.RECV_B
                assert each.peer is not None, f"{each} names no peer"
                receive = Instruction(kind, each.peer, each.microbatch, each.stage)
                problem = f"rank {needs.rank[node]}: {each} is never received"
                yield [_place(needs, node)], problem, _in_line(receive, needs.schedule)


def _too_late(needs: Needs) -> Iterator[Problem]:
    for node, before in enumerate(needs.before):
        for need in before:
            if need > node and needs.rank[need] == needs.rank[node]:
                places = [_place(needs, node), _place(needs, need)]
                first, second = needs.nodes[need], needs.nodes[node]
                problem = f"rank {needs.rank[node]}: {second} needs {first}, which comes only after it"
                yield places, problem, f"{first} before {second}"


def _crossed_links(needs: Needs) -> Iterator[Problem]:
    """Check that sends and receives of one link match in order: a link is a FIFO."""
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    for node, each in enumerate(needs.nodes):
        if each.kind in RECEIVES:
            receives.setdefault((needs.rank[needs.before[node][0]], needs.rank[node]), []).append(node)
        elif each.kind in SENDS and each.peer is not None:
            sends.setdefault((needs.rank[node], needs.schedule.placement.ranks[each.peer]), []).append(node)
    for (source, target), order in sends.items():
        for send, receive in zip(order, receives[source, target], strict=True):
            if needs.before[receive][0] != send:
                problem = (
                    f"ranks {source} and {target}: {needs.nodes[send]} meets {needs.nodes[receive]}, "
                    "for a link keeps its order"
                )
                yield [_place(needs, send), _place(needs, receive)], problem, "receives in the order of their sends"


def _deadlock(needs: Needs) -> Iterator[Problem]:
    try:
        play(needs.schedule, free())
    except StuckError as stuck:
        standing = {needs.rank[node]: node for node in stuck.waiting}
        waits = {rank: _undone_need(needs, stuck.waiting[node], standing) for rank, node in standing.items()}
        # Follow the wait-for graph from any stuck rank: it leads into a cycle, which is the problem to report.
        way = [next(iter(waits))]
        while (following := needs.rank[waits[way[-1]]]) in waits and following not in way:
            way.append(following)
        circle = way[way.index(following) :] if following in way else way
        told = ", ".join(
            f"rank {rank} at {needs.nodes[standing[rank]]} for {needs.nodes[waits[rank]]} of rank "
            f"{needs.rank[waits[rank]]}"
            for rank in circle
        )
        places = [_place(needs, standing[rank]) for rank in circle]
        yield places, f"ranks wait for each other: {told}", "one of these instructions earlier"


def _undone_need(needs: Needs, need: int, standing: dict[int, int]) -> int:
    """Return the computation behind a transfer or reduction that is waited for."""
    while needs.nodes[need].kind not in COMPUTE:
        undone = [node for node in needs.before[need] if node >= standing.get(needs.rank[node], len(needs.nodes))]
        if not undone:
            break
        need = undone[0]
    return need


def _untied(needs: Needs) -> Iterator[Problem]:
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
                    f"rank {needs.rank[node]}: {instruction} steps on weights shared with "
                    f"{'stages' if len(tie) > 2 else 'stage'} {others} before their gradients have met"
                )
                yield [_place(needs, node)], problem, f"{wanted} before {instruction}"


def _not_by_all(needs: Needs) -> Iterator[Problem]:
    """Find a step that only some stages take, or a reduction that only some of its stages join."""
    schedule = needs.schedule
    everyone = tuple(range(schedule.placement.num_stages))
    groups: list[tuple[Kind, int | None, tuple[int, ...]]] = [
        (Kind.STEP, None, everyone),
        (Kind.REDUCE, None, everyone),
    ]
    groups += [(Kind.REDUCE, number, tie) for number, tie in enumerate(schedule.placement.ties)]
    for kind, number, members in groups:
        for step in range(schedule.num_steps):
            found = {stage: needs.find(kind, stage, step, number) for stage in members}
            there = next((node for node in found.values() if node is not None), None)
            for stage, node in found.items():
                if node is None and there is not None:
                    wanted, rank = Instruction(kind, stage, step, number), schedule.placement.ranks[stage]
                    problem = f"rank {needs.rank[there]} does {needs.nodes[there]}, but rank {rank} never does {wanted}"
                    yield [_place(needs, there)], problem, _in_line(wanted, schedule)


def _crossed_ties(needs: Needs) -> Iterator[Problem]:
    """Find deadlocks of tied reductions: each waits for all its stages, so ranks must join them in the same order."""
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], tuple[int, int]] = {}
    for rank, order in enumerate(needs.schedule.orders):
        last: dict[tuple[int, int], int] = {}
        for node, each in enumerate(order, start=needs.first_node[rank]):
            if each.kind is Kind.REDUCE and each.peer is not None:
                last[each.microbatch, each.peer] = node
        for first, second in pairwise(sorted(last, key=lambda reduction: last[reduction])):
            pairs[first, second] = last[first], last[second]
    graph = TopologicalSorter[tuple[int, int]]()
    for first, second in pairs:
        graph.add(second, first)
    try:
        graph.prepare()
    except CycleError as error:
        circle = [pairs[pair] for pair in pairwise(error.args[1])]
        told = "; ".join(
            f"rank {needs.rank[first]} does {needs.nodes[first]} before {needs.nodes[second]}"
            for first, second in circle
        )
        places = [_place(needs, node) for pair in circle for node in pair]
        yield places, f"reductions wait for each other: {told}", "tied reductions in one order on all ranks"


def _not_gathered(schedule: Schedule) -> Iterator[Problem]:
    for rank, order in enumerate(schedule.orders):
        sharded = {each.stage for each in order if each.kind is Kind.GATHER}
        gathered: dict[int, int] = {}
        for position, instruction in enumerate(order):
            kind, stage, number, _, _ = instruction
            place = [(rank, position)]
            if kind is Kind.GATHER:
                if stage in gathered:
                    problem = f"rank {rank}: {instruction} gathers stage {stage}, which is gathered already"
                    yield place, problem, f"{stage}RELEASE{gathered[stage]} before {instruction}"
                gathered[stage] = number
            elif kind is Kind.RELEASE and gathered.pop(stage, None) != number:
                problem = f"rank {rank}: {instruction} releases what is not gathered"
                yield place, problem, f"{stage}GATHER{number} before {instruction}"
            for part in instruction.parts:
                if part.kind in _COMPUTED and part.stage in sharded and part.stage not in gathered:
                    problem = f"rank {rank}: {part} uses the parameters of stage {part.stage}, which are not gathered"
                    yield place, problem, f"a GATHER of stage {part.stage} before {part}"
        for stage, number in gathered.items():
            instruction = Instruction(Kind.GATHER, stage, number)
            place = [(rank, order.index(instruction))]
            yield place, f"rank {rank}: {instruction} is never released", f"{stage}RELEASE{number} behind its last use"
