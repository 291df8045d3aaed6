"""Ranks that others wait for: an overloaded stage, a slower device, a rank that stalls occasionally."""

from collections.abc import Iterator
from statistics import mean, median

from shardwise.explain.doctor.case import Case, Finding, alike, least_busy, medians, usual_busy
from shardwise.explain.doctor.cuts import other_cuts
from shardwise.trace.stretches import Part

#: How much more than the others one must have before it is called slow.
_SLOWER = 1.12
#: The same of a step with fewer than `_ENOUGH` microbatches, in which one disturbed moment looks like a slow rank.
_SLOWER_OF_FEW, _ENOUGH = 1.5, 4
#: How many times its usual time an instruction must take to be called a stall.
_STALLED = 3.0
_LOOK_THERE = "ps -eo pid,pcpu,comm --sort=-pcpu | head"


def find_slow_stage(case: Case) -> Iterator[Finding]:
    """Yield a rank whose stages take longer than those of others, and not because of its device."""
    # Of one rank of each set of replicas: the seconds that it would compute if nothing stalled.
    busy = {rank: usual_busy(events) for rank, *_ in case.same if (events := case.trace.compute[rank])}
    if case.replay is None or len(busy) < 2:
        return
    slow = max(busy, key=lambda rank: busy[rank])
    others = mean(seconds for rank, seconds in busy.items() if rank != slow)
    if busy[slow] < _SLOWER * others or slow in [rank for rank, _, _ in _slow_devices(case)]:
        return
    stages = {rank: {event.stage for event in case.trace.compute[rank]} for rank in busy}
    fix, gain = _evened(case, slow, busy, stages)
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
        fix=fix,
        gain_seconds=gain,
        ranks=(slow,),
    )


def find_straggler(case: Case) -> Iterator[Finding]:
    """Yield a rank that is slower than others with the same work, or than predicted."""
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
    """Return ranks slower than others with the same work, or than predicted while others are not: rank, factor,
    others."""
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


def _evened(case: Case, slow: int, busy: dict[int, float], stages: dict[int, set[int]]) -> tuple[str, float]:
    """Return the fastest cut of the model that fits on every rank; if its units are unknown, how much to move."""
    assert case.replay is not None, "slow stages are looked for in steps that can be played"
    layers, now = case.layers, case.replay.usual_seconds
    if layers is None or len(layers) != sum(map(len, stages.values())):
        even = mean(busy.values())
        factors = {stage: even / busy[rank] for rank in busy for stage in stages[rank] if busy[rank] > 0}
        words = f"layers=A+B+... in the plan, with {1 - even / busy[slow]:.0%} fewer on stage {min(stages[slow])}"
        return words, now - case.replay.with_stages(factors)
    room = [cut for cut in other_cuts(case) if case.has_room(cut.fullest_bytes - case.fullest_bytes)]
    best = min(room, key=lambda cut: cut.seconds, default=None)
    return ("", 0.0) if best is None else (best.plan, now - best.seconds)
