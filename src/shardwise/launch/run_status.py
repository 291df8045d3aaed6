"""The status of a run, from its folder and its launcher: which ranks run where, since when, and its history.

submitted   where it was submitted
starts      one for each time that ranks were started: from which step, to which, how it ended
state       running, waiting, finished, stopped or lost
"""

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardwise.copies.keepers import holders_of, survey
from shardwise.errors import ShardwiseError
from shardwise.launch.membership import left_out
from shardwise.launch.on_kubernetes import object_state
from shardwise.launch.slurm_site import find_job
from shardwise.trace.history import Start, slow_now, starts_of
from shardwise.trace.journal import Event, read_journal
from shardwise.trace.metrics import read_metrics

_CHECKPOINT = re.compile(r"step-(\d{8,})")
#: How long to watch an owner on another machine: it increments a counter in its lock every 2 s (`training/lock.py`).
_WATCHED_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run. `job` is the launcher's state; `step` is the last recorded. `copy_step` is that of the
    newest complete copy in memory, and `copies_problem` is what the last start reported about copies."""

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
    #: Journal entries: ranks that are slow now, numbers that were wrong.
    slow: tuple[Event, ...] = ()
    corrupt: tuple[Event, ...] = ()
    #: Hosts that the run stopped for, to continue without them.
    left_out: tuple[str, ...] = ()


def status_of(folder: Path) -> RunStatus:
    """Read the folder of a run, and ask its launcher."""
    events = read_journal(folder)
    checkpoint = _last_checkpoint(folder)
    if not folder.is_dir() or not (events or checkpoint or (folder / "recipe.toml").is_file()):
        raise ShardwiseError(f"there is no run at {folder}", remedy="the --folder of shardwise train or launch")
    starts = starts_of(events)
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
        slow=tuple(slow_now(events)),
        corrupt=tuple(each for each in events if each["event"] == "corrupt"),
        left_out=left_out(events),
    )


def _copies_problem(events: Sequence[Event]) -> str | None:
    """Return the problem with copies since ranks were last started."""
    begun = max((number for number, each in enumerate(events) if each["event"] == "start"), default=0)
    found = [str(each["problem"]) for each in events[begun:] if each["event"] == "copies" and "problem" in each]
    return found[-1] if found else None


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
    """Whether a process trains it now. Does not compare clocks of different machines."""
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
        return False  # There is no lock, or it was just released.
    return False


def _ask(on: str | None, job: str | None) -> tuple[str | None, str | None]:
    """Return the launcher's state of a job, and why it waits."""
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
