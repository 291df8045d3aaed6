"""All that the doctor looks for, and what was found, the gravest first."""

from collections.abc import Callable, Iterator

from shardwise.explain.doctor import balance, bubbles, device, host, memory, replicas
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
    """Return what holds a run up."""
    case = Case(run)
    if not case.trace.events or case.step_seconds <= 0:
        return []
    found = [finding for rule in RULES for finding in rule(case)]
    return sorted(found, key=lambda finding: -(finding.gain_seconds or 0.0))
