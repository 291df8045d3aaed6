"""How a run stands, from what lies in its folder and what its launcher says: who runs where, since when, and what was.

submitted   where it was handed to
starts      one for each time that ranks were started: where from, where to, how it ended
state       running, waiting, finished, stopped or lost
"""

import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.copies.keepers import holders_of, survey
from shardwise.errors import ShardwiseError
from shardwise.launch.on_kubernetes import object_state
from shardwise.launch.slurm_site import find_job
from shardwise.trace.journal import Event, read_journal
from shardwise.trace.metrics import read_metrics

_CHECKPOINT = re.compile(r"step-(\d{8,})")
#: How long an owner on another machine is watched: it counts up in its lock every 2 s (`training/lock.py`).
_WATCHED_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One time that the ranks were started: from which step, of a copy in memory or a checkpoint on disk, and how it
    ended (None: no end was written)."""

    when: str
    step: int
    plan: str
    places: tuple[Mapping[str, Any], ...]
    attempt: str | None
    ended: str | None
    end_step: int | None
    why: str | None
    source: str | None = None

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for place in self.places:
            found.setdefault(str(place["host"]), []).append(int(place["rank"]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How a run stands. `job` is what its launcher says; `step` is the last that was noted. `copy_step` is that of the
    newest copy in memory that is whole, and `copies_problem` what the last start had to tell of them."""

    folder: str
    state: str
    step: int | None
    checkpoint: str | None
    checkpoint_when: str | None
    on: str | None
    job: str | None
    job_state: str | None
    job_reason: str | None
    starts: tuple[Start, ...]
    copy_step: int | None = None
    copy_when: str | None = None
    copy_nodes: tuple[str, ...] = ()
    copies_problem: str | None = None


def status_of(folder: Path) -> RunStatus:
    """Read the folder of a run, and ask who runs it."""
    events = read_journal(folder)
    checkpoint = _last_checkpoint(folder)
    if not folder.is_dir() or not (events or checkpoint or (folder / "recipe.toml").is_file()):
        raise ShardwiseError(f"there is no run at {folder}", remedy="the --folder of shardwise train or launch")
    starts = _starts(events)
    submitted = next((each for each in reversed(events) if each["event"] == "submitted"), None)
    job = None if submitted is None else str(submitted.get("job"))
    on = None if submitted is None else str(submitted.get("on"))
    job_state, reason = _ask(on, job)
    rows = read_metrics(folder)
    there = survey(folder)
    copy = next(iter(holders_of(there)), None)
    dated = {node: when for node, pieces in there.items() for generation, _, when in pieces if generation == copy}
    return RunStatus(
        folder=str(folder),
        state=_state(starts, job_state, is_owned=_is_owned(folder)),
        step=max((int(row["step"]) for row in rows), default=None),
        checkpoint=None if checkpoint is None else checkpoint.name,
        checkpoint_when=None if checkpoint is None else _when(checkpoint),
        on=on,
        job=job,
        job_state=job_state,
        job_reason=reason,
        starts=starts,
        copy_step=None if copy is None else copy.step,
        copy_when=None if copy is None else _date(max(dated.values())),
        copy_nodes=tuple(dated),
        copies_problem=_copies_problem(events),
    )


def _copies_problem(events: Sequence[Event]) -> str | None:
    """What was the matter with copies since ranks were last started."""
    begun = max((number for number, each in enumerate(events) if each["event"] == "start"), default=0)
    found = [str(each["problem"]) for each in events[begun:] if each["event"] == "copies" and "problem" in each]
    return found[-1] if found else None


def _starts(events: Sequence[Event]) -> tuple[Start, ...]:
    """Every start with what ended it. One without an end of its own is explained by the attempt after it."""
    places = [number for number, each in enumerate(events) if each["event"] == "start"]
    found = []
    for number, place in enumerate(places):
        start = events[place]
        until = places[number + 1] if number + 1 < len(places) else len(events)
        between = events[place + 1 : until]
        end = next((each for each in between if each["event"] == "end"), None)
        why = None if end is None else str(end["why"])
        after = next((str(each["after"]) for each in between if each["event"] == "attempt" and "after" in each), None)
        status = next((each["status"] for each in between if each["event"] == "attempt end"), None)
        if after is not None:
            why = after if why is None else f"{after}: {why}"
        elif why is None and status is not None:
            why = f"ended with status {status}"
        elif why is None and number + 1 < len(places):
            why = "ended without a word"
        found.append(
            Start(
                when=str(start["when"]),
                step=int(start["step"]),
                plan=str(start["plan"]),
                places=tuple(start.get("places", ())),
                attempt=start.get("attempt"),
                ended=None if end is None else str(end["when"]),
                end_step=None if end is None else end.get("step"),
                why=why,
                source=start.get("source"),
            )
        )
    return tuple(found)


def _state(starts: Sequence[Start], job_state: str | None, *, is_owned: bool) -> str:
    if starts and starts[-1].why == "finished":
        return "finished"
    if is_owned:
        return "running"
    if job_state in ("PENDING", "REQUEUED", "CONFIGURING", "Pending", "Suspended"):
        return "waiting"
    if job_state in ("RUNNING", "COMPLETING", "Running"):
        return "starting"
    if not starts:
        return "not started"
    return "lost" if starts[-1].why is None else "stopped"


def _is_owned(folder: Path) -> bool:
    """Whether somebody trains it now. No clock is compared with another machine's."""
    lock = folder / "lock"
    try:
        before = lock.read_bytes()
        owner = json.loads(before)
        if owner["host"] == socket.gethostname():
            return _is_alive(int(owner["process"]))
        deadline = time.monotonic() + _WATCHED_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if lock.read_bytes() != before:
                return True
    except (OSError, ValueError, KeyError):
        return False  # There is none, or it was just let go of.
    return False


def _ask(on: str | None, job: str | None) -> tuple[str | None, str | None]:
    """What the launcher says of a job, and why it waits."""
    if job is None:
        return None, None
    with suppress(ShardwiseError):
        if on == "slurm":
            found = find_job(job)
            if found is not None:
                reason = found.get("Reason", "None")
                return found.get("JobState"), None if reason == "None" else reason
        elif on == "kubernetes":
            for kind in ("jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org"):
                state = object_state(kind, job)
                if state != "Gone":
                    return state, None
        elif on in ("local", "hosts") and job.isdecimal():
            return ("RUNNING" if _is_alive(int(job)) else None), None
    return None, None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _when(path: Path) -> str:
    return _date(path.stat().st_mtime)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _last_checkpoint(folder: Path) -> Path | None:
    found = [path for path in folder.glob("checkpoints/step-*") if _CHECKPOINT.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)
