"""Ranks that others wait for: a stage with too much on it, a slower device, a rank that stalls now and then."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import mean, median

from shardwise.explain.doctor.case import Case, Finding, alike, least_busy, medians, usual_busy
from shardwise.trace.stretches import Part

#: How much more than the others one must have before it is called slow.
_SLOWER = 1.12
#: The same of a step with fewer than `_ENOUGH` microbatches, in which one disturbed moment looks like a slow rank.
_SLOWER_OF_FEW, _ENOUGH = 1.5, 4
#: How many times its usual time an instruction must take to be called a stall.
_STALLED = 3.0
_LOOK_THERE = "ps -eo pid,pcpu,comm --sort=-pcpu | head"


def find_slow_stage(case: Case) -> Iterator[Finding]:
    """A rank whose stages take longer than those of the others, and that not because of its device."""
    # Of one rank of each set of replicas: the seconds that it would compute if nothing stalled.
    busy = {rank: usual_busy(events) for rank, *_ in case.same if (events := case.trace.compute[rank])}
    if case.replay is None or len(busy) < 2:
        return
    slow = max(busy, key=lambda rank: busy[rank])
    others = mean(seconds for rank, seconds in busy.items() if rank != slow)
    if busy[slow] < _SLOWER * others or slow in [rank for rank, _, _ in _slow_devices(case)]:
        return
    even = mean(busy.values())
    stages = {rank: {event.stage for event in case.trace.compute[rank]} for rank in busy}
    factors = {stage: even / busy[rank] for rank in busy for stage in stages[rank] if busy[rank] > 0}
    gain = case.replay.usual_seconds - case.replay.with_stages(factors)
    if not case.is_worth(gain):
        return
    waiting = mean(
        sum(each.seconds for each in case.cut[rank] if each.part is Part.WAITING) for rank in busy if rank != slow
    )
    several = len(stages[slow]) > 1
    named = f"stage{'s' if several else ''} {' and '.join(map(str, sorted(stages[slow])))}"
    yield Finding(
        kind="slow stage",
        problem=f"{named} on rank {slow} {'are' if several else 'is'} slow, and the others wait",
        evidence=(
            f"it computes for {case.time(busy[slow])} of a step, the others for {case.time(others)} on average "
            f"({busy[slow] / others:.2f} times as much); they stand still for {case.time(waiting)} each"
        ),
        fix=_layers_fix(case, slow, busy, stages),
        gain_seconds=gain,
        ranks=(slow,),
    )


def find_straggler(case: Case) -> Iterator[Finding]:
    """A rank that is slower than others that do the same, or than it was predicted to be."""
    for rank, factor, against in _slow_devices(case):
        stages = {event.stage for event in case.trace.compute[rank]}
        gain = case.trace.busy[rank] * (1 - 1 / factor)
        if case.replay is not None:
            gain = case.replay.usual_seconds - case.replay.with_stages(dict.fromkeys(stages, 1 / factor))
        if case.is_worth(gain):
            yield Finding(
                kind="straggler",
                problem=f"rank {rank} is slower than {against}",
                evidence=(
                    f"its instructions take {factor:.2f} times as long: it computes for "
                    f"{case.time(case.trace.busy[rank])} of a step of {case.time(case.step_seconds)}"
                ),
                fix=f"{_LOOK_THERE}   (on the machine of rank {rank}: what else runs there)",
                gain_seconds=gain,
                ranks=(rank,),
            )


def find_stalls(case: Case) -> Iterator[Finding]:
    """Single instructions that take far longer than others of their kind."""
    if case.replay is None:
        return
    for rank, events in enumerate(case.trace.compute):
        usual = medians(events)
        late = [event for event in events if event.seconds > _STALLED * usual[alike(event)] > 0]
        if not late or len(late) > 0.4 * len(events):
            continue
        gain = case.replay.seconds - case.replay.with_even_instructions([rank])
        longest = max(late, key=lambda event: event.seconds)
        if case.is_worth(gain):
            yield Finding(
                kind="stalls",
                problem=f"rank {rank} stalls now and then",
                evidence=(
                    f"{len(late)} of its {len(events)} instructions took over {_STALLED:g} times as long as usual; the "
                    f"longest, {longest.name}, took {case.time(longest.seconds)} and usually takes "
                    f"{case.time(usual[alike(longest)])}"
                ),
                fix=f"{_LOOK_THERE}   (on the machine of rank {rank}: what else runs there)",
                gain_seconds=gain,
                ranks=(rank,),
            )


def _slow_devices(case: Case) -> list[tuple[int, float, str]]:
    """Ranks slower than those who do the same, or than predicted while the others are not: rank, factor, than whom."""
    found = []
    for ranks in case.same:
        busy = {rank: usual_busy(case.trace.compute[rank]) for rank in ranks}
        for rank in ranks if len(ranks) > 1 else ():
            events = case.trace.compute[rank]
            others = mean(busy[other] for other in ranks if other != rank)
            enough = _SLOWER if case.num_microbatches >= _ENOUGH else _SLOWER_OF_FEW
            if others > 0 and least_busy(events) > enough * others:
                found.append((rank, busy[rank] / others, "its replicas"))
    predicted = case.run.predicted
    if predicted is not None and predicted.num_ranks == case.trace.num_ranks > 2 and not found:
        off = [mine / then if then > 0 else 0.0 for mine, then in zip(case.trace.busy, predicted.busy, strict=True)]
        for rank, factor in enumerate(off):
            usual = median(other for place, other in enumerate(off) if place != rank)
            if usual > 0 and factor > 1.25 * usual:
                found.append((rank, factor / usual, "was predicted, and the others are not"))
    return found


def _layers_fix(case: Case, slow: int, busy: dict[int, float], stages: dict[int, set[int]]) -> str:
    layers = case.layers
    if layers is None or len(layers) != sum(map(len, stages.values())) or case.replay is None:
        fewer = 1 - mean(busy.values()) / busy[slow]
        return f"layers=A+B+... in the plan, with {fewer:.0%} fewer on stage {min(stages[slow])}"
    costs = [
        seconds / units
        for seconds, units in zip(case.replay.stage_seconds, layers, strict=True)
        for _ in range(units)
        if units
    ]
    return "layers=" + "+".join(map(str, even_cut(costs, len(layers))))


def even_cut(costs: Sequence[float], num_stages: int) -> list[int]:
    """Units of each stage, in order, so that the dearest stage is as cheap as can be."""
    sums = [0.0, *accumulate(costs)]
    # For each number of units, what the dearest stage costs that they make, and how they are cut.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, cut) in best.items():
            for end in range(start + 1, len(sums)):
                dearest = max(so_far, sums[end] - sums[start])
                if end not in after or dearest < after[end][0] - 1e-12:
                    after[end] = dearest, [*cut, end - start]
        best = after
    return best[len(costs)][1]
