"""All examinations of the doctor, and their findings, those with the largest gain first."""

from collections.abc import Callable, Iterator, Sequence

from shardwise.explain.doctor import balance, bubbles, device, host, memory, replicas, requests
from shardwise.explain.doctor.case import Case, Finding
from shardwise.trace.run import Run

Rule = Callable[[Case], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    balance.find_slow_stage,
    balance.find_straggler,
    balance.find_stalls,
    bubbles.find_bubble,
    bubbles.find_transfers,
    replicas.find_exposed_sum,
    replicas.find_exposed_gather,
    replicas.find_exposed_layers,
    replicas.find_synchronisation,
    host.find_data_wait,
    host.find_host_overhead,
    host.find_long_optimizer,
    host.find_wrong_prediction,
    device.find_host_bound,
    device.find_exposed_copies,
    device.find_late_stream,
    memory.find_imbalance,
    memory.find_nearly_full,
    memory.find_needless_recomputation,
    memory.find_idle_optimizer_memory,
)


def examine(run: Run) -> list[Finding]:
    """Return what holds a run up; or, where it is of requests, what they waited for."""
    if run.is_of_requests:
        return requests.find_slow_requests(run)
    case = Case(run)
    if not case.trace.events or case.step_seconds <= 0:
        return []
    found = [finding for rule in RULES for finding in rule(case)]
    return without_contradictions(sorted(found, key=lambda finding: -(finding.gain_seconds or 0.0)))


def without_contradictions(found: Sequence[Finding]) -> list[Finding]:
    """Return, of findings that would set one plan key to different values, the one with the largest gain."""
    kept: list[Finding] = []
    for finding in found:
        mine = changes_of(finding.fix)
        if not any(mine.get(key, value) != value for each in kept for key, value in changes_of(each.fix).items()):
            kept.append(finding)
    return kept


def changes_of(fix: str) -> dict[str, str]:
    """Return the plan keys that a fix sets, with their values; none if the fix is something else to type."""
    text = fix.split(" ", 1)[0]
    pairs = [part.partition("=") for part in text.split(",")]
    return {key: value for key, _, value in pairs if value and "..." not in value}
