"""Why requests were slow: what they waited for, by the names of `serving/request_trace.py`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardwise.explain.doctor.case import Finding
from shardwise.trace.events import Lane
from shardwise.trace.run import Run
from shardwise.units import format_percent

#: What is worth a word: a part of the time that all requests took, or of the slowest one's.
_MUCH, _MUCH_OF_SLOWEST = 0.1, 0.3
_RANK = "rank "

_PROBLEMS: Mapping[str, tuple[str, str, str]] = {
    "blocks": (
        "waited for blocks",
        "requests wait for KV blocks",
        "--kv with more bytes, --kv-host 8GiB for what has to leave, or --max-length with fewer tokens",
    ),
    "a tier": (
        "waited for a tier",
        "requests wait for blocks from the host or from files",
        "--kv with more bytes; --kv-folder on a faster disk, or no --kv-files",
    ),
    "other prompts": (
        "waited for other prompts",
        "requests wait while prompts of others are read",
        "--plan dp=2 for a second replica; in a script load_engine(..., token_budget=256)",
    ),
    "a place": (
        "waited for a place",
        "requests wait until one of those who run is done",
        "--plan dp=2 for a second replica; in a script load_engine(..., max_running=128)",
    ),
    "the queue": (
        "waited in the queue",
        "requests wait before the engine takes them",
        "--plan dp=2 for a second replica, or fewer requests at once",
    ),
}


def find_slow_requests(run: Run) -> list[Finding]:
    """Return what delayed requests, the most serious first."""
    rows = seconds_by_name(run)
    whole = sum(sum(row.values()) for row in rows.values())
    if not whole:
        return []
    slowest = max(rows, key=lambda row: sum(rows[row].values()))
    found = sorted(_findings(run, rows, whole, slowest), key=lambda pair: -pair[0])
    return [finding for _, finding in found]


def _findings(
    run: Run, rows: Mapping[int, Mapping[str, float]], whole: float, slowest: int
) -> Iterator[tuple[float, Finding]]:
    """Return each cause with the seconds that all requests lost by it."""
    for name in sorted({name for row in rows.values() for name in row}):
        if name not in _PROBLEMS and not name.startswith(_RANK):
            continue
        total = sum(row.get(name, 0.0) for row in rows.values())
        own, all_of_slowest = rows[slowest].get(name, 0.0), sum(rows[slowest].values())
        if total < _MUCH * whole and own < _MUCH_OF_SLOWEST * all_of_slowest:
            continue
        kind, problem, fix = _PROBLEMS.get(name) or _slow_rank(name)
        hit = sum(row.get(name, 0.0) > 0 for row in rows.values())
        worst = max(rows, key=lambda row: rows[row].get(name, 0.0))
        lost, took = rows[worst].get(name, 0.0), sum(rows[worst].values())
        finding = Finding(
            kind=kind,
            problem=problem,
            evidence=f"{hit} of {len(rows)} requests, for {format_percent(total / whole)} of their time; request"
            f" {worst} for {run.time(lost)} of its {run.time(took)}",
            fix=fix,
            about=f"request {worst} would take {run.time(took - lost)}",
            ranks=(worst,),
        )
        yield total, finding


def _slow_rank(name: str) -> tuple[str, str, str]:
    return (
        "waited for a rank",
        f"{name} computes longer than the others, and every step waits for it",
        f"another device for {name}; with pp, layers= with fewer layers on its stage",
    )


def seconds_by_name(run: Run) -> dict[int, dict[str, float]]:
    """Return what each request did and waited for, by name, in seconds."""
    rows: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in run.trace.events:
        rows[event.rank][event.name if event.lane is not Lane.COMPUTE else "computed"] += event.seconds
    return rows
