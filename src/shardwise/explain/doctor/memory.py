"""Memory: a rank that holds more than the others, a nearly full device, unused memory."""

from collections.abc import Iterator
from statistics import mean, median

from shardwise.explain.doctor.case import WORTH_BYTES, Case, Finding, alike
from shardwise.explain.doctor.cuts import STATE, other_cuts
from shardwise.trace.stretches import Part
from shardwise.units import format_bytes, format_percent

_UNEVEN = 1.3
_TO_SPARE = 0.5
#: How many times as much a block keeps if it is not computed again: 34 bytes a value for the 2 of its input
#: (Korthikanti et al., Reducing Activation Recomputation, equation 1 without the attention scores).
_KEPT_WITHOUT_RECOMPUTATION = 17
_REMEDIES = {"activations": "recompute=full", "optimizer": "zero=1", "gradients": "zero=2", "parameters": "zero=3"}


def find_imbalance(case: Case) -> Iterator[Finding]:
    """Yield a rank with more of the model than the others: an embedding or a head counts too.

    Told where another cut makes its memory at least a tenth less and the step no longer, or where memory is short.
    """
    limit = case.run.memory_bytes
    if len(case.held) < 2 or (limit is not None and case.fullest_bytes < _TO_SPARE * limit):
        return
    state = [sum(peak.get(owner, 0.0) for owner in STATE) for peak in case.held]
    fullest = max(range(len(state)), key=lambda rank: state[rank])
    usual = median(held for rank, held in enumerate(state) if rank != fullest)
    if usual <= 0 or state[fullest] < _UNEVEN * usual or state[fullest] - usual < WORTH_BYTES * case.fullest_bytes:
        return
    advised = _less_uneven(case, fullest, (state[fullest] - usual) / 2)
    if advised is None:
        return
    fix, about = advised
    others = [held for rank, held in enumerate(case.held) if rank != fullest]
    more = {each: case.held[fullest].get(each, 0.0) - median(peak.get(each, 0.0) for peak in others) for each in STATE}
    owner = max(more, key=more.__getitem__)
    yield Finding(
        kind="memory imbalance",
        problem=f"rank {fullest} holds {state[fullest] / usual:.1f} times as much of the model as the others",
        evidence=(
            f"{format_bytes(state[fullest])} of parameters, gradients and optimizer against {format_bytes(usual)}; "
            f"most of the difference are {owner}: embedding, head and norms count too"
        ),
        fix=fix,
        about=about,
        ranks=(fullest,),
    )


def _less_uneven(case: Case, fullest: int, even_bytes: float) -> tuple[str, str] | None:
    """Return what to type, and its gain and cost; None if it is not worth it."""
    if case.layers is None or case.replay is None:
        stage = min((event.stage for event in case.trace.compute[fullest]), default=0)
        words = f"layers=A+B+... in the plan, with fewer on stage {stage}"
        return (words, f"about {format_bytes(even_bytes)} less on rank {fullest}") if case.is_nearly_full else None
    now, bytes_now = case.replay.usual_seconds, case.fullest_bytes
    cuts = [each for each in other_cuts(case) if each.fullest_bytes <= (1 - WORTH_BYTES) * bytes_now]
    if not case.is_nearly_full:
        # With free memory a slower step is no improvement, and the next advice would be to move the layers back.
        cuts = [each for each in cuts if each.seconds <= now * (1 + 1e-9)]
    best = min(cuts, key=lambda cut: (cut.seconds, cut.fullest_bytes), default=None)
    if best is None:
        return None
    less = format_percent(1 - best.fullest_bytes / bytes_now, decimals=0)
    slower = best.seconds / now - 1
    time = f"a step {format_percent(slower)} longer" if slower > 1e-9 else "a step no longer"
    return best.plan, f"{format_bytes(bytes_now - best.fullest_bytes)} less on the fullest rank ({less}), and {time}"


def find_nearly_full(case: Case) -> Iterator[Finding]:
    """Yield a device with hardly any free memory, and the largest owner."""
    limit = case.run.memory_bytes
    if limit is None or not case.trace.holdings:
        return
    totals = [sum(peak.values()) for peak in case.held]
    fullest = max(range(len(totals)), key=lambda rank: totals[rank])
    if not case.is_nearly_full:
        return
    owner = max(case.held[fullest], key=lambda each: case.held[fullest][each])
    has_replicas = case.size("dp") > 1
    fix = _REMEDIES[owner] if owner == "activations" or has_replicas else f"pp={2 * case.size('pp')}"
    yield Finding(
        kind="nearly full",
        problem=f"rank {fullest} is {format_percent(totals[fullest] / limit, decimals=0)} full",
        evidence=(
            f"it holds {format_bytes(totals[fullest])} of {format_bytes(limit)} at its fullest, "
            f"{format_bytes(case.held[fullest][owner])} of them {owner}"
        ),
        fix=fix,
        about=f"{format_bytes(limit - totals[fullest])} are left",
        ranks=(fullest,),
    )


def find_needless_recomputation(case: Case) -> Iterator[Finding]:
    """Forwards that are made again though there is room to keep what they made."""
    again, limit = case.mean(Part.RECOMPUTATION), case.run.memory_bytes
    if case.replay is None or again < 0.02 * case.step_seconds or limit is None or not case.trace.holdings:
        return
    fullest, kept = case.fullest_bytes, max(peak.get("activations", 0.0) for peak in case.held)
    if fullest > _TO_SPARE * limit or not case.has_room((_KEPT_WITHOUT_RECOMPUTATION - 1) * kept):
        return
    factors = {}
    for rank, found in enumerate(case.cut):
        spent = sum(each.seconds for each in found if each.part is Part.RECOMPUTATION)
        backward = sum(event.seconds for event in case.trace.compute[rank] if alike(event)[0] != "F")
        factors[rank] = 1 - spent / backward if backward > 0 else 1.0
    gain = case.replay.usual_seconds - case.replay.with_backward(factors)
    if case.is_worth(gain):
        yield Finding(
            kind="needless recomputation",
            problem="forwards are made again though there is room to keep what they made",
            evidence=(
                f"{case.time(again)} of a rank's step ({case.share(again)}) are recomputation, and the fullest rank "
                f"holds {format_bytes(fullest)} of {format_bytes(limit)}"
            ),
            fix="recompute=none",
            gain_seconds=gain,
        )


def find_idle_optimizer_memory(case: Case) -> Iterator[Finding]:
    """Optimizer state on the host while its device has room for it."""
    share, limit = case.plan.get("offload.optimizer", "0"), case.run.memory_bytes
    if share in ("0", "0.0") or limit is None or not case.trace.holdings:
        return
    state = mean(peak.get("optimizer", 0.0) for peak in case.held)
    optimizer = case.mean(Part.OPTIMIZER)
    if case.has_room(state) and case.is_worth(optimizer * float(share)):
        yield Finding(
            kind="optimizer state offloaded",
            problem="optimizer state is offloaded to the host though the device has room for it",
            evidence=(
                f"offload.optimizer={share}; the optimizer takes {case.time(optimizer)} ({case.share(optimizer)} "
                f"of the step), and the fullest rank holds {format_bytes(case.fullest_bytes)} of {format_bytes(limit)}"
            ),
            fix="offload.optimizer=0",
            gain_seconds=optimizer * float(share),
        )
