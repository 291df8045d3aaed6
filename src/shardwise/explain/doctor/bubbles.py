"""Bubbles, and the schedule that would shrink them; transfers between stages that are too many or too small."""

from collections.abc import Iterator
from itertools import islice

from shardwise.explain.doctor.case import SMALL_MESSAGE, Case, Finding
from shardwise.schedule.replay import Alternative
from shardwise.trace.events import Lane
from shardwise.units import format_bytes, format_number

#: A bubble of less is what pipelines have.
_LARGE_BUBBLE = 0.08
_MUCH_EXPOSED = 0.05
#: How much more a rank may hold for a remedy to be one.
_NO_MORE_MEMORY = 1.05


def find_bubble(case: Case) -> Iterator[Finding]:
    """Yield a pipeline whose ranks idle for lack of input, if another schedule or more microbatches would help."""
    replay = case.replay
    if replay is None or case.bubble_seconds < _LARGE_BUBBLE * case.step_seconds or len(replay.stage_seconds) < 2:
        return
    fitting = (each for each in replay.alternatives if each.held <= _NO_MORE_MEMORY * replay.held)
    options = [(each.plan, each.seconds) for each in islice(fitting, 1)]
    twice = 2 * case.num_microbatches
    doubled = replay.with_microbatches(twice) if case.can_have_microbatches(twice) else None
    if doubled is not None:
        options.append((f"microbatches={twice}", doubled))
    if not options:
        return
    fix, seconds = min(options, key=lambda option: option[1])
    gain = replay.usual_seconds - seconds
    if case.is_worth(gain):
        others = "; ".join(f"{plan} would make it {case.time(other)}" for plan, other in options)
        yield Finding(
            kind="bubble",
            problem=f"ranks idle for want of input for {case.share(case.bubble_seconds)} of the step",
            evidence=(
                f"{case.trace.name} with {case.num_microbatches} microbatches, played with its usual times, takes "
                f"{case.time(replay.usual_seconds)}; {others}, with no more activations held than now"
            ),
            fix=fix,
            gain_seconds=gain,
        )


def find_transfers(case: Case) -> Iterator[Finding]:
    """Yield values between stages that ranks wait for."""
    replay, exposed = case.replay, case.transfer_seconds
    if replay is None or exposed < _MUCH_EXPOSED * case.step_seconds:
        return
    sent = [each for each in case.trace.traffic if each.peer is not None]
    sends = sum(event.lane is Lane.SEND for event in case.trace.events)
    num_messages = sum(each.num_messages for each in sent) or sends
    mean_bytes = case.message_bytes
    size = "" if mean_bytes is None else f" of {format_bytes(mean_bytes)} on average"
    evidence = (
        f"{num_messages} transfers{size} in a step; ranks stand still for {case.time(exposed)} each "
        f"({case.share(exposed)} of the step) while values move"
    )
    chunks = len(replay.stage_seconds) / max(len({event.rank for rank in case.trace.compute for event in rank}), 1)
    if chunks > 1:
        single = [each for each in replay.alternatives if each.plan in ("schedule=1f1b", "schedule=zb-h1")]
        yield from _told(case, "many transfers", "activations are sent too often", evidence, single)
    elif mean_bytes is not None and mean_bytes < SMALL_MESSAGE and case.num_microbatches >= 4:
        # Half as many microbatches, each twice as large, cost half as many hops, and a larger bubble.
        half = case.num_microbatches // 2
        seconds = replay.with_microbatches(half)
        options = [] if seconds is None else [Alternative(f"microbatches={half}", seconds, 0.0)]
        yield from _told(case, "small messages", "messages between stages are too small", evidence, options)
    else:
        eager = [each for each in replay.alternatives if each.plan == "schedule=eager-1f1b"]
        yield from _told(case, "slow link", "transfers between stages are not hidden", evidence, eager)


def _told(case: Case, kind: str, problem: str, evidence: str, options: list[Alternative]) -> Iterator[Finding]:
    if not options or case.replay is None:
        return
    best = min(options, key=lambda option: option.seconds)
    gain = case.replay.usual_seconds - best.seconds
    if case.is_worth(gain):
        more = f"; a rank would hold {format_number(best.held, 3)} microbatches at most" if best.held else ""
        yield Finding(kind=kind, problem=problem, evidence=evidence + more, fix=best.plan, gain_seconds=gain)
