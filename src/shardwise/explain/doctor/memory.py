"""Bytes: a rank that holds more than the others, a device that is nearly full, memory that is left unused."""

from collections.abc import Iterator
from statistics import mean, median

from shardwise.explain.doctor.case import Case, Finding, alike
from shardwise.trace.stretches import Part
from shardwise.units import format_bytes, format_percent

_UNEVEN = 1.3
_NEARLY_FULL = 0.9
_TO_SPARE = 0.5
#: What belongs to the model itself. Activations differ from rank to rank by the schedule.
_STATE = ("parameters", "gradients", "optimizer")
_REMEDIES = {"activations": "recompute=full", "optimizer": "zero=1", "gradients": "zero=2", "parameters": "zero=3"}


def find_imbalance(case: Case) -> Iterator[Finding]:
    """A rank with more of the model on it than the others: an embedding or a head counts too."""
    if len(case.held) < 2:
        return
    state = [sum(peak.get(owner, 0.0) for owner in _STATE) for peak in case.held]
    fullest = max(range(len(state)), key=lambda rank: state[rank])
    usual = median(held for rank, held in enumerate(state) if rank != fullest)
    total = max(sum(peak.values()) for peak in case.held)
    if usual <= 0 or state[fullest] < _UNEVEN * usual or state[fullest] - usual < 0.1 * total:
        return
    others = [held for rank, held in enumerate(case.held) if rank != fullest]
    more = {each: case.held[fullest].get(each, 0.0) - median(peak.get(each, 0.0) for peak in others) for each in _STATE}
    owner = max(more, key=more.__getitem__)
    layers = case.layers
    stage = min((event.stage for event in case.trace.compute[fullest]), default=0)
    fix = f"layers=A+B+... in the plan, with fewer on stage {stage}"
    if layers is not None and stage < len(layers) and layers[stage] > 1 and len(layers) > 1:
        moved = list(layers)
        moved[stage] -= 1
        moved[stage - 1 if stage else 1] += 1
        fix = "layers=" + "+".join(map(str, moved))
    yield Finding(
        kind="memory imbalance",
        problem=f"rank {fullest} holds {state[fullest] / usual:.1f} times as much of the model as the others",
        evidence=(
            f"{format_bytes(state[fullest])} of parameters, gradients and optimizer against {format_bytes(usual)}; "
            f"most of the difference are {owner}: embedding, head and norms count too"
        ),
        fix=fix,
        about=f"about {format_bytes((state[fullest] - usual) / 2)} less on rank {fullest}",
        ranks=(fullest,),
    )


def find_nearly_full(case: Case) -> Iterator[Finding]:
    """A device with hardly any room left, and who owns most of it."""
    limit = case.run.memory_bytes
    if limit is None or not case.trace.holdings:
        return
    totals = [sum(peak.values()) for peak in case.held]
    fullest = max(range(len(totals)), key=lambda rank: totals[rank])
    if totals[fullest] < _NEARLY_FULL * limit:
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
    fullest = max(sum(peak.values()) for peak in case.held)
    if fullest > _TO_SPARE * limit:
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
    fullest = max(sum(peak.values()) for peak in case.held)
    optimizer = case.mean(Part.OPTIMIZER)
    if fullest + state <= _NEARLY_FULL * limit and case.is_worth(optimizer):
        yield Finding(
            kind="optimizer state offloaded",
            problem="optimizer state is offloaded to the host though the device has room for it",
            evidence=(
                f"offload.optimizer={share}; the optimizer takes {case.time(optimizer)} ({case.share(optimizer)} "
                f"of the step), and the fullest rank holds {format_bytes(fullest)} of {format_bytes(limit)}"
            ),
            fix="offload.optimizer=0",
            gain_seconds=optimizer * float(share),
        )
