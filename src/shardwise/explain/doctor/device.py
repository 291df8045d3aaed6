"""What delays a GPU whose streams were profiled: late launches by the host, copies, a stream that others wait for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from shardwise.explain.doctor.case import Case, Finding
from shardwise.explain.doctor.host import fewer_microbatches
from shardwise.trace.activities import COPIES, WORK, Activity, short_name
from shardwise.trace.hidden import joined, overlap
from shardwise.trace.stretches import Part

#: A device that has nothing to do for less than this part of the step is as busy as they are.
_MUCH_IDLE = 0.1
_MUCH_EXPOSED = 0.05
#: A kernel that runs for less than it takes a host to launch one.
_TINY_SECONDS = 6e-6


def find_host_bound(case: Case) -> Iterator[Finding]:
    """Yield a GPU that waits for its host: for kernels shorter than their launch, or for something else."""
    idle = case.mean(Part.HOST, Part.LAUNCH)
    kernels = [each for each in case.trace.activities if each.kind in WORK]
    if not kernels or idle < _MUCH_IDLE * case.step_seconds:
        return
    count = len(kernels) / case.num_seen
    usual = median(each.seconds for each in kernels)
    evidence = (
        f"nothing runs on a GPU for {case.time(idle)} of its step ({case.share(idle)}): {count:.0f} kernels, half of "
        f"them under {case.time(usual)}"
    )
    fix, gain = _fewer_launches(case, idle)
    if not case.is_worth(gain):
        return
    if usual < _TINY_SECONDS:
        yield Finding(
            kind="tiny kernels",
            problem="kernels run for less time than it takes to launch them",
            evidence=evidence,
            fix=fix,
            gain_seconds=gain,
        )
        return
    rank, start, end = max(
        ((each.rank, each.start, each.end) for rank in case.cut for each in rank if each.part is Part.HOST),
        key=lambda gap: gap[2] - gap[1],
        default=(0, 0.0, 0.0),
    )
    after = next((each for each in case.trace.activities_of_ranks[rank] if each.start >= end - 1e-9), None)
    before = "" if after is None else f", before {short_name(after.name)}{_inside(after)}"
    yield Finding(
        kind="host bound",
        problem="the host launches kernels later than the GPU could run them",
        evidence=f"{evidence}; the longest gap is {case.time(end - start)} on rank {rank}{before}",
        fix=fix,
        gain_seconds=gain,
    )


def _inside(activity: Activity) -> str:
    return f" of {activity.instruction}" if activity.instruction else ""


def _fewer_launches(case: Case, idle: float) -> tuple[str, float]:
    """Return a fix with the same number of launches for more work: larger microbatches, otherwise a larger batch."""
    if case.num_microbatches > 1:
        fewer, gain = fewer_microbatches(case, idle)
        return f"microbatches={fewer}", gain
    rows = case.run.facts.get("batch", "")
    twice = str(2 * int(rows)) if rows.isdecimal() else "ROWS, twice as many as now"
    return f"--set batch={twice}   (in a script: parallelize(..., compile=True), for fewer kernels)", idle / 2


def find_exposed_copies(case: Case) -> Iterator[Finding]:
    """Yield copies between host and device that overlap with nothing."""
    copies = [each for each in case.trace.activities if each.kind in COPIES]
    exposed = case.mean(Part.COPIES) + case.copied_data_seconds
    if not copies or exposed < _MUCH_EXPOSED * case.step_seconds:
        return
    total = sum(each.seconds for each in copies)
    pageable = sum(each.seconds for each in copies if each.is_pageable)
    by_kind = {kind: sum(each.seconds for each in copies if each.kind is kind) for kind in sorted(COPIES)}
    most = max(by_kind, key=lambda kind: by_kind[kind])
    evidence = (
        f"for {case.time(exposed)} of a rank's step ({case.share(exposed)}) a GPU does nothing but copy, most of it "
        f"{most}; {len(copies) / case.num_seen:.0f} copies take {case.time(total / case.num_seen)}"
    )
    if pageable > total / 2:
        yield Finding(
            kind="pageable copies",
            problem="copies are from or to memory that is not pinned, and the host waits for each",
            evidence=f"{evidence}, {pageable / total:.0%} of it pageable",
            fix="tensor.pin_memory() on the host and .to(device, non_blocking=True)   (a loader: pin_memory=True)",
            gain_seconds=exposed,
        )
        return
    shared = [key for key in ("offload.parameters", "offload.activations", "offload.optimizer") if case.offloads(key)]
    yield Finding(
        kind="exposed copies",
        problem="copies between host and GPU are not hidden behind kernels",
        evidence=evidence,
        fix=f"{shared[0]}=0" if shared else ".to(device, non_blocking=True) before what comes first is computed",
        gain_seconds=exposed,
    )


def find_late_stream(case: Case) -> Iterator[Finding]:
    """Kernels of a side stream that the stream of the computation waits for, while it has kernels to run."""
    # The same two streams of many ranks are one finding: for each, the seconds and the rank that waits longest.
    found: dict[tuple[int, int], dict[int, float]] = {}
    for rank, uses in enumerate(case.streams):
        computing = [use for use in uses if use.role == "compute"]
        if len(computing) < 2:
            continue
        main, *others = sorted(computing, key=lambda use: use.idle_seconds)
        activities = case.trace.activities_of_ranks[rank]
        waits = _held_up([each for each in activities if each.stream == main.stream])
        for use in others:
            mine = joined([(each.start, each.end) for each in _kernels(case, rank, use.stream)])
            alone = overlap(waits, mine)
            if alone >= _MUCH_EXPOSED * case.step_seconds:
                found.setdefault((main.stream, use.stream), {})[rank] = alone
    for (main_stream, side_stream), ranks in found.items():
        yield _late_stream(case, main_stream, side_stream, ranks)


def _kernels(case: Case, rank: int, stream: int) -> list[Activity]:
    return [each for each in case.trace.activities_of_ranks[rank] if each.stream == stream and each.kind in WORK]


def _held_up(activities: Sequence[Activity]) -> list[tuple[float, float]]:
    """Return when a stream was idle although its next kernel had been launched."""
    found = []
    for before, after in pairwise(activities):
        begin = max(before.end, before.end if after.launched is None else after.launched)
        if after.start > begin:
            found.append((begin, after.start))
    return found


def _late_stream(case: Case, main: int, side: int, ranks: Mapping[int, float]) -> Finding:
    worst = max(ranks, key=lambda rank: ranks[rank])
    alone = ranks[worst]
    longest = max(_kernels(case, worst, side), key=lambda each: each.seconds)
    many = f"{len(ranks)} ranks, most of all rank {worst}," if len(ranks) > 1 else f"rank {worst}"
    return Finding(
        kind="late stream",
        problem=f"stream {main} of {many} waits for stream {side}",
        evidence=(
            f"for {case.time(alone)} of the step ({case.share(alone)}) stream {side} runs alone while stream "
            f"{main} has kernels that were launched; its longest kernel, {short_name(longest.name)}"
            f"{_inside(longest)}, takes {case.time(longest.seconds)}"
        ),
        fix="torch.cuda.Stream(priority=-1) for what runs there, or begin it earlier",
        gain_seconds=alone,
        ranks=tuple(sorted(ranks)),
    )
