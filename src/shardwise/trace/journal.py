"""The journal of a run: a line for each event, in order: `RUN/journal.jsonl`.

    {"event": "submitted", "when": ..., "on": "slurm", "job": "17", ...}     by `shardwise launch`
    {"event": "attempt", "job": "17", "restart": 1, "nodes": [...], ...}     by the job, before ranks are started
    {"event": "start", "step": 40, "plan": "dp=2", "places": [...]}          by the first rank, when all are ready
    {"event": "checkpoint", "step": 60}                                      by the first rank, when it begins to save
    {"event": "copy", "step": 64}                                            when all ranks have copies in memory
    {"event": "slow", "rank": 1, "host": ..., "cause": "data", ...}          a rank is slow; `slow over`: no more
    {"event": "corrupt", "step": 64, "ranks": [1], "what": ...}              numbers were wrong, by ranks' fault
    {"event": "back", "hosts": ["node3"]}                                    by the job: these could take part again
    {"event": "end", "step": 80, "why": "SIGUSR1"}                           by the first rank; none where it was killed
                                                                             `leave_out`: hosts to go on without
                                                                             `take_in`: hosts that it ended for
    {"event": "attempt end", "status": 0}                                    by the job

Lines are only appended, each by one write, so that several machines can write. A full disk does not end a run: what
cannot be written is left out.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

JOURNAL = "journal.jsonl"

Event = Mapping[str, Any]


def note(folder: Path, event: str, **facts: Any) -> None:
    """Add a line. Facts that are None are left out."""
    known = {key: each for key, each in facts.items() if each is not None}
    line = json.dumps({"event": event, "when": datetime.now(UTC).isoformat(timespec="seconds"), **known})
    with suppress(OSError), (folder / JOURNAL).open("ab+", buffering=0) as file:
        # After a line that was cut off when a machine was lost, start a new one.
        is_cut = file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        file.write(("\n" * is_cut + line + "\n").encode())


def read_journal(folder: Path) -> list[Event]:
    """Return all events of a run. A line that was cut off when a machine was lost is left out."""
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Event] = []
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and {"event", "when"} <= event.keys():
                found.append(event)
    return found


def hosts_back(events: Sequence[Event]) -> tuple[str, ...]:
    """Return hosts that could take part again, by the lines since the last start."""
    begun = max((number for number, each in enumerate(events) if each["event"] == "start"), default=0)
    told = (each.get("hosts", ()) for each in events[begun:] if each["event"] == "back")
    return tuple(dict.fromkeys(str(host) for hosts in told for host in hosts))
