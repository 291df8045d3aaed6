"""Time outside of compute and communication: the batch, host work, the optimizer; and wrong predictions."""

from collections.abc import Iterator

from shardwise.explain.doctor.case import Case, Finding, usual_busy
from shardwise.trace.stretches import Part

_MUCH_HOST = 0.15
_LONG_OPTIMIZER = 0.12
_FAR_OFF = 0.25


def find_data_wait(case: Case) -> Iterator[Finding]:
    """Yield ranks that wait for their batch."""
    waited = case.mean(Part.DATA) - case.copied_data_seconds
    if case.is_worth(waited):
        yield Finding(
            kind="data wait",
            problem="ranks wait for their batch",
            evidence=f"{case.time(waited)} of every step, {case.share(waited)} of it, before anything is computed",
            fix="shardwise data TEXT --save mine.tokens, once, and --set data.source=mine.tokens",
            gain_seconds=waited,
        )


def find_host_overhead(case: Case) -> Iterator[Finding]:
    """Instructions so short that what starts them takes a good part of the step."""
    if case.trace.activities:
        return  # What a GPU waits for is known better: `device.py`.
    host = case.mean(Part.HOST)
    count = sum(map(len, case.trace.compute)) / case.trace.num_ranks
    if host < _MUCH_HOST * case.step_seconds or case.num_microbatches < 2:
        return
    fewer, gain = fewer_microbatches(case, host)
    if not case.is_worth(gain):
        return
    yield Finding(
        kind="host overhead",
        problem="the host is busy starting short instructions",
        evidence=(
            f"{case.time(host)} of a rank's step ({case.share(host)}) are neither compute nor waiting, with "
            f"{count:.0f} instructions of {case.time(sum(case.trace.busy) / case.trace.num_ranks / max(count, 1))} each"
        ),
        fix=f"microbatches={fewer}",
        gain_seconds=gain,
    )


def fewer_microbatches(case: Case, host: float) -> tuple[int, float]:
    """Half as many microbatches, and what that gains of the host's seconds: less than half where a bubble grows."""
    fewer = max(case.num_microbatches // 2, 1)
    played = None if case.replay is None else case.replay.with_microbatches(fewer)
    if case.replay is None or played is None:
        return fewer, host * (1 - fewer / case.num_microbatches)
    return fewer, case.replay.usual_seconds - played


def find_long_optimizer(case: Case) -> Iterator[Finding]:
    """Replicas that each make the same step with all of the weights."""
    spent, replicas = case.mean(Part.OPTIMIZER), case.size("dp") * case.size("cp")
    # Half of a sum is a gather, which zero=1 has after the step: at worst nothing hides it.
    gain = spent * (1 - 1 / replicas) - case.sum_seconds / 2
    is_long = spent >= _LONG_OPTIMIZER * case.step_seconds and case.is_worth(gain)
    if is_long and replicas > 1 and case.plan.get("zero", "0") == "0":
        yield Finding(
            kind="long optimizer",
            problem=f"{replicas} replicas each update all of the weights",
            evidence=f"the optimizer takes {case.time(spent)}, {case.share(spent)} of the step, on every rank",
            fix="zero=1",
            gain_seconds=gain,
        )


def find_wrong_prediction(case: Case) -> Iterator[Finding]:
    """Yield a step whose prediction is far off: it was planned with prices that are not this machine's."""
    predicted = case.run.predicted
    if predicted is None or not case.trace.is_measured or predicted.makespan <= 0:
        return
    # Stalls have a finding of their own.
    computed, foreseen = max(map(usual_busy, case.trace.compute)), max(predicted.busy)
    off = computed / foreseen - 1 if foreseen > 0 else 0.0
    if abs(off) > _FAR_OFF:
        yield Finding(
            kind="wrong prediction",
            problem=f"computing takes {abs(off):.0%} {'longer' if off > 0 else 'less'} than was predicted",
            evidence=(
                f"the busiest rank usually computes for {case.time(computed)} of a step, and was predicted to for "
                f"{case.time(foreseen)}"
            ),
            fix="shardwise profile --calibrate cluster.toml, and plan again with --cluster cluster.toml",
            about="plans are chosen by prices that are not this machine's",
        )
