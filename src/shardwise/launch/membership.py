"""Which hosts of a run take part in its next attempt: those that answer, and that the run has not been slow on.

A host that comes back takes part from the next attempt on, and the run starts that attempt at its next checkpoint:
while it continues with fewer hosts, a process polls the missing ones (`await_hosts`). Hosts that the run has named
since it was launched with these hosts stay left out; a new launch that names one of them includes it again.
"""

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwise.errors import ShardwiseError
from shardwise.trace.journal import Event
from shardwise.units import counted

#: A host that does not answer in time is asked once more after a pause: it may be about to come back.
_ANSWER_SECONDS, _PAUSE_SECONDS = 15.0, 3.0
#: How often missing hosts are polled.
_LOOK_SECONDS = 10.0


def left_out(events: Sequence[Event], job: str | None = None) -> tuple[str, ...]:
    """Return the hosts that a run stopped for, to continue without them; with `job`, those since that job began."""
    begun = next((n for n, each in enumerate(events) if each["event"] == "attempt" and each.get("job") == job), 0)
    since = events if job is None else events[begun:]
    return tuple(dict.fromkeys(str(host) for each in since for host in each.get("leave_out", ())))


def failed_with(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the hosts that came back for a job's last attempt, if no ranks started in it but did in earlier ones."""
    known: Sequence[str] = ()
    last: Event = {}
    for each in events:
        if each["event"] == "attempt":
            known = known if each.get("job") == last.get("job") else ()
            last = each
        elif each["event"] == "start":
            known = last.get("nodes", ())
    return tuple(host for host in last.get("nodes", ()) if known and host not in known)


def take_part(
    hosts: Sequence[str], ssh: str, events: Sequence[Event], job: str, *, least: int
) -> tuple[list[str], str | None]:
    """Return the hosts that take part, in order, and why others do not. Refuses fewer than `least`."""
    named = [host for host in left_out(events, job) if host in hosts]
    lost = _silent([host for host in hosts if host not in named], ssh)
    taking = [host for host in hosts if host not in named and host not in lost]
    failed = {host for each in events if each["event"] == "attempt end" for host in each.get("leave_out", ())}
    whys = [f"{host} does not answer" for host in lost]
    whys += [f"{host} is left out as {'ranks failed with it' if host in failed else 'it was slow'}" for host in named]
    why = ", ".join(whys) or None
    if len(taking) < least:
        raise ShardwiseError(
            f"{counted(len(taking), 'host')} of {len(hosts)} can take part, and --least-hosts is {least}: {why}",
            remedy="the same launch when they are back: it continues from its last checkpoint",
        )
    return taking, why


def _silent(hosts: Sequence[str], ssh: str) -> list[str]:
    silent = list(hosts)
    for pause in (0.0, _PAUSE_SECONDS):
        if silent:
            time.sleep(pause)
            with ThreadPoolExecutor(len(silent)) as pool:
                answers = list(pool.map(lambda host: _answers(host, ssh), silent))
            silent = [host for host, answer in zip(silent, answers, strict=True) if not answer]
    return silent


def _answers(host: str, ssh: str) -> bool:
    try:
        told = subprocess.run(
            [*shlex.split(ssh), host, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return told.returncode == 0


def await_hosts(
    missing: Sequence[str], is_back: Callable[[str], bool], tell: Callable[[str], None], goes_on: Callable[[], bool]
) -> None:
    """Poll hosts until all are back. Each is reported once."""
    waited = list(missing)
    while waited and goes_on():
        for host in [host for host in waited if is_back(host)]:
            waited.remove(host)
            tell(host)
        if waited:
            time.sleep(_LOOK_SECONDS)
