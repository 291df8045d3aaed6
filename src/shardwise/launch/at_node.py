"""What a job does on its machines before and after the ranks: `python -m shardwise.launch.at_node VERB`.

    begin    on the first node: choose a port, or check that the given one is free; record the attempt
    report   on every node: print its versions, and whether it sees what the first node wrote
    judge    read all reports: print a sentence on what differs, and on which node
    watch    beside ranks on hosts over ssh: poll the hosts that do not take part, and record which could again
    end      record how the attempt ended, and print what to do next: requeue, again, more or over

It does not import torch, so that all of it is fast.
"""

import argparse
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from shardwise import environment
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.launch.membership import await_hosts, failed_with, left_out, take_part
from shardwise.launch.tools import try_asking
from shardwise.trace.journal import Event, note, read_journal
from shardwise.units import format_seconds

MARK = ".seen-by-all"
_PORTS = range(20_000, 30_000)
_PACKAGES = ("torch", "numpy", "safetensors")
#: The largest difference between clocks: nodes that are asked at once answer within this many seconds.
_MOST_SECONDS_APART = 60.0


def report(folder: Path, mark: str, port: int | None) -> dict[str, Any]:
    """Return the report of this node."""
    try:
        seen = (folder / MARK).read_text(encoding="utf-8").strip()
    except OSError:
        seen = ""
    told = {
        "node": environment.node_name(),
        "versions": {**environment.versions_of(_PACKAGES), "shardwise": _sources()},
        "is_shared": seen == mark,
        "clock": time.time(),
    }
    return told if port is None else {**told, "is_port_free": is_free(port)}


def judge(reports: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Refuse nodes that do not see the same folder, or have different versions."""
    blind = [each["node"] for each in reports if not each["is_shared"]]
    if blind:
        raise ShardwiseError(
            f"the folder {folder} is not shared: {', '.join(blind)} {'does' if len(blind) == 1 else 'do'} not see what"
            " was written there",
            remedy="--folder on a file system that all nodes have",
        )
    for package in sorted({name for each in reports for name in each["versions"]}):
        nodes = defaultdict[str, list[str]](list)
        for each in reports:
            nodes[each["versions"].get(package, "none")].append(each["node"])
        if len(nodes) > 1:
            said = "; ".join(f"{version} on {', '.join(names)}" for version, names in nodes.items())
            raise ShardwiseError(
                f"nodes have different versions of {package}: {said}",
                remedy="--python with an environment that all nodes share",
            )
    _judge_clocks([(str(each["node"]), float(each["clock"])) for each in reports if "clock" in each])


def _judge_clocks(clocks: Sequence[tuple[str, float]]) -> None:
    """Refuse nodes whose clocks differ, because their records of a run could not be ordered. All reported at once."""
    ahead, behind = (choose(clocks, key=lambda each: each[1], default=("", 0.0)) for choose in (max, min))
    if ahead[1] - behind[1] > _MOST_SECONDS_APART:
        raise ShardwiseError(
            f"the clock of {ahead[0]} is {format_seconds(ahead[1] - behind[1])} ahead of that of {behind[0]}",
            remedy="timedatectl set-ntp true on all nodes, or chronyd",
        )


def write_mark(folder: Path) -> str:
    """Write a random mark, which only nodes that share the folder can read."""
    mark = secrets.token_hex(8)
    with os_errors_as(f"the folder {folder} cannot be written to", remedy="another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(mark, encoding="utf-8")
    return mark


def is_free(port: int) -> bool:
    """Whether no process listens on the port."""
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def choose_port(asked: int | None) -> int:
    """Return the port at which ranks rendezvous."""
    if asked is not None and not is_free(asked):
        raise ShardwiseError(
            f"port {asked} of {environment.node_name()} is taken", remedy="another --port, or none: a free one is taken"
        )
    if asked is not None:
        return asked
    # Outside of the system's ephemeral range: another process could get such a port before the ranks listen.
    return next(port for port in iter(lambda: _PORTS.start + secrets.randbelow(len(_PORTS)), 0) if is_free(port))


def begin(folder: Path, port: int | None, nodes: Sequence[str], job: str, restart: int) -> tuple[int, str]:
    """Record the attempt, and why the previous one ended. Returns the port and the mark."""
    mark, chosen = write_mark(folder), choose_port(port)
    note(folder, "attempt", job=job, restart=restart, nodes=list(nodes), after=_why_again(read_journal(folder)))
    return chosen, mark


def begin_on(
    folder: Path, hosts: Sequence[str], job: str, restart: int, *, ssh: str, least: int
) -> tuple[str, list[str]]:
    """Do the same on hosts over ssh. Return the mark and the hosts that take part: at first all, which were checked."""
    mark, events = write_mark(folder), read_journal(folder)
    taking, why = (list(hosts), None) if restart == 0 else take_part(hosts, ssh, events, job, least=least)
    if why is not None:
        print(f"going on with {', '.join(taking)}: {why}", file=sys.stderr)
    note(folder, "attempt", job=job, restart=restart, nodes=taking, after=why or _why_again(events))
    return mark, taking


def _why_again(events: Sequence[Event]) -> str | None:
    """Return why the previous attempt ended without a record; None if there was none, or its end was recorded."""
    attempts = [number for number, each in enumerate(events) if each["event"] == "attempt"]
    if not attempts or any(each["event"] == "attempt end" for each in events[attempts[-1] :]):
        return None
    before = events[attempts[-1]].get("nodes", [])
    lost = _nodes_that_are_gone(before)
    return f"lost {', '.join(lost)}" if lost else f"it ended without a word on {', '.join(before)}"


def _nodes_that_are_gone(nodes: Iterable[str]) -> list[str]:
    """Return the nodes that Slurm reports as down or not responding, with their states."""
    try:
        told = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %T"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    states = dict(line.split() for line in told.splitlines() if len(line.split()) == 2)
    words = ("down", "drained", "draining", "fail", "unknown")
    return [f"{node} ({state})" for node, state in states.items() if state.startswith(words) or state.endswith("*")]


def watch(
    folder: Path, hosts: Sequence[str], taking: Sequence[str], job: str, mark: str, *, ssh: str, report: str
) -> None:
    """Record hosts that could take part again: those that answer, have the versions of the first host that does, and
    see the folder. `report` is the command that asks a host. It ends with the shell that started it."""
    parent, slow, said = os.getppid(), left_out(read_journal(folder), job), set[str]()

    def is_back(host: str) -> bool:
        try:
            found = _ask_for_report(host, ssh, report, mark)
        except ShardwiseError:
            return False
        try:
            judge([_ask_for_report(taking[0], ssh, report, mark), found], folder)
        except ShardwiseError as error:
            # Ranks are not stopped for a host that could not take part.
            if error.problem not in said:
                print(f"{host} is back, and cannot take part: {error.problem}", file=sys.stderr, flush=True)
            said.add(error.problem)
            return False
        return True

    await_hosts(
        [host for host in hosts if host not in taking and host not in slow],
        is_back,
        tell=lambda host: note(folder, "back", hosts=[host]),
        goes_on=lambda: os.getppid() == parent,
    )


def _ask_for_report(host: str, ssh: str, report: str, mark: str) -> dict[str, Any]:
    """Return the report of a host, under the name that it has here."""
    answer = try_asking([*shlex.split(ssh), host, f"{report} --mark {mark}"])
    try:
        if answer.returncode == 0:
            return {**json.loads(answer.stdout), "node": host}
    except ValueError:
        pass
    said = answer.stderr.strip().splitlines() or [f"status {answer.returncode}"]
    raise ShardwiseError(f"{host} does not answer: {said[-1]}", remedy=f"{ssh} {host}, until that works")


def end(folder: Path, status: int, script: str | None = None, nodes: Sequence[str] = ()) -> str:
    """Return what to do when ranks have ended: `requeue` if time was up, `again` if they had begun, `more` if they
    ended to continue with hosts that are back, else `over`.

    With a Slurm `script`, a run that must continue without a host is submitted again, and is `over` here; if it has
    other `nodes`, it continues on them.
    """
    # Hosts that came back, but with which no ranks could be started, are left out: without them it would continue.
    without = failed_with(read_journal(folder)) if status != 0 and nodes else ()
    note(folder, "attempt end", status=status, leave_out=list(without) or None)
    if without:
        return "again"
    events = read_journal(folder)
    begun = max((number for number, each in enumerate(events) if each["event"] == "attempt"), default=0)
    started = [number for number, each in enumerate(events) if each["event"] == "start" and number > begun]
    ends = [each for each in events[started[-1] :] if each["event"] == "end"] if started else []
    if status == 0:
        return "requeue" if ends and ends[-1]["why"] == "SIGUSR1" else "over"
    if any(each.get("take_in") for each in ends):
        return "more"
    hosts = [host for each in ends for host in each.get("leave_out", ())]
    if hosts and set(nodes) - set(hosts):
        return "again"
    if hosts and script is None:
        print(f"started again without {', '.join(hosts)}, it continues from its last checkpoint", file=sys.stderr)
        return "over"
    if hosts and script is not None and _hand_over_without(folder, left_out(events), script):
        return "over"
    # An error before the first step would repeat; so would one for which a run has stopped itself.
    return "again" if started and not any(each.get("is_final") for each in ends) else "over"


def _hand_over_without(folder: Path, hosts: Sequence[str], script: str) -> bool:
    """Submit the script again, to run after this job and on other nodes. Returns whether Slurm accepted it."""
    job, task = environment.find_variable("SLURM_JOB_ID"), environment.find_variable("SLURM_ARRAY_TASK_ID")
    words = ["sbatch", "--parsable", f"--exclude={','.join(hosts)}", f"--dependency=afterany:{job}"]
    words += [] if task is None else [f"--array={task}"]
    try:
        if "--switches=" in Path(script).read_text(encoding="utf-8"):
            # The remaining nodes need not share a switch: do not wait for hours for that.
            words.append(f"--switches={environment.find_variable('SLURM_JOB_NUM_NODES')}")
        told = subprocess.run([*words, script], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip()
        print(f"Slurm takes no job without {', '.join(hosts)}: {why}", file=sys.stderr)
        return False
    note(folder, "submitted", on="slurm", job=told.strip().partition(";")[0], without=list(hosts))
    return True


def _sources() -> str:
    """Return a checksum of this package: two nodes may have the same release and different sources."""
    root = Path(__file__).parents[1]
    total = 0
    for path in sorted(root.rglob("*.py")):
        total = crc32(path.read_bytes(), crc32(path.relative_to(root).as_posix().encode(), total))
    return f"{environment.versions_of(['shardwise']).get('shardwise', 'of a folder')} ({total:08x})"


def main(words: Sequence[str]) -> int:
    """Run one verb. An error is a sentence on stderr, and status 1."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.at_node")
    parser.add_argument("verb", choices=("begin", "report", "judge", "watch", "end"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--mark", default="")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--job", default="")
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--ssh", help="nodes are hosts that this reaches")
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--taking", default="", help="of the nodes, those that take part")
    parser.add_argument("--report", default="", help="what asks a host for its report")
    parser.add_argument("--script", help="of Slurm, to be handed over again where a host is left out")
    told = parser.parse_args(words)
    try:
        if told.verb == "begin" and told.ssh is not None:
            hosts = told.nodes.split()
            mark, taking = begin_on(told.folder, hosts, told.job, told.restart, ssh=told.ssh, least=told.least)
            print("-", mark, *taking)
        elif told.verb == "begin":
            port, mark = begin(told.folder, told.port, told.nodes.split(), told.job, told.restart)
            print(port, mark)
        elif told.verb == "report":
            print(json.dumps(report(told.folder, told.mark, told.port)), flush=True)
        elif told.verb == "judge":
            judge([json.loads(line) for line in sys.stdin if line.strip()], told.folder)
        elif told.verb == "watch":
            hosts, taking = told.nodes.split(), told.taking.split()
            watch(told.folder, hosts, taking, told.job, told.mark, ssh=told.ssh, report=told.report)
        else:
            print(end(told.folder, told.status, told.script, told.nodes.split()))
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
