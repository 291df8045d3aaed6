"""A real Slurm on this machine: a controller, munge, and four nodes, each a `slurmd` of its own.

    left     node1 node2        two switches below one, so that topology can be asked for
    right    node3 node4

Every node has two GPUs as far as Slurm knows; nobody looks at them. Two queues: `short`, and `closed`,
which takes no jobs.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.ports import free_ports

NODES = ("node1", "node2", "node3", "node4")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")

_CONF = """
ClusterName=shardwise
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
TopologyPlugin=topology/tree
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=8
KillWait=10
MpiDefault=none
{nodes}
PartitionName=short Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=closed Nodes=ALL MaxTime=60 State=DOWN
"""
_TOPOLOGY = """
SwitchName=left Nodes=node[1-2]
SwitchName=right Nodes=node[3-4]
SwitchName=top Switches=left,right
"""


def missing() -> str | None:
    """A sentence on what is not here, if anything."""
    gone = [program for program in PROGRAMS if shutil.which(program) is None]
    if gone:
        return f"no Slurm is installed here ({', '.join(gone)}): apt install slurmctld slurmd slurm-client munge"
    # A slurmd starts jobs in the names of users.
    return None if os.geteuid() == 0 else "Slurm's daemons are started by root, and this is another user"


class Site:
    """A Slurm that is up."""

    def __init__(self, folder: Path, daemons: dict[str, "subprocess.Popen[bytes]"]) -> None:
        self.folder, self._daemons = folder, daemons
        self.conf = folder / "slurm.conf"

    def ask(self, *words: str) -> str:
        """What one of Slurm's programs prints."""
        variables = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(words, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "--noheader", "--Node", "--format", "%N %t", "--partition", "short").splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: str) -> dict[str, str]:
        """What is known of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def start_now(self, number: str) -> None:
        """A job that was queued again waits two minutes by default.

        Nodes count in seconds: what is sent to them in the second in which they let go of the job before is refused.
        """
        time.sleep(3)
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now")

    def kill_node(self, name: str) -> None:
        """As if the machine had lost its power: its daemon and everything that it has started, at once."""
        daemon = self._daemons.pop(name)
        victims = [daemon.pid, *_processes_of(name)]
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        daemon.wait()

    def start_node(self, name: str) -> None:
        self._daemons[name] = _start(self.folder, "slurmd", "-D", "-N", name, "-f", str(self.conf))
        _until(lambda: self.states().get(name) == "idle", f"{name} is not idle")

    def clear(self) -> None:
        """No job is left, and every node is up."""
        numbers = self.ask("squeue", "--noheader", "--format", "%i").split()
        if numbers:
            self.ask("scancel", *numbers)
        for name in NODES:
            if name not in self._daemons:
                self.start_node(name)
        _until(lambda: not self.ask("squeue", "--noheader", "--format", "%i").split(), "jobs are left")


@contextmanager
def slurm_site(folder: Path) -> Iterator[Site]:
    """Started, and ended with all that it has started."""
    port = free_ports(len(NODES) + 1)
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port[1 + number]} CPUs=2 RealMemory=1000"
        " Gres=gpu:2 State=UNKNOWN"
        for number, name in enumerate(NODES)
    ]
    text = _CONF.format(host=host, port=port[0], user=getpass.getuser(), folder=folder, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "topology.conf").write_text(_TOPOLOGY)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        stack.callback(_end, daemons)
        places = [
            f"--{each}={folder}/munge.{each.partition('-')[0]}"
            for each in ("socket", "pid-file", "log-file", "seed-file")
        ]
        daemons["munged"] = _start(folder, "munged", "--foreground", "--force", f"--key-file={key}", *places)
        _until((folder / "munge.socket").exists, "munged does not listen")
        conf = str(folder / "slurm.conf")
        daemons["slurmctld"] = _start(folder, "slurmctld", "-D", "-f", conf)
        for name in NODES:
            daemons[name] = _start(folder, "slurmd", "-D", "-N", name, "-f", conf)
        site = Site(folder, daemons)
        _until(lambda: set(_states_or_none(site).values()) == {"idle"}, "nodes are not idle")
        yield site
        with suppress(subprocess.SubprocessError, AssertionError):
            site.clear()


def _states_or_none(site: Site) -> dict[str, str]:
    try:
        return site.states()
    except subprocess.SubprocessError:
        return {}  # The controller does not listen yet.


def _start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    # A daemon ends with the process of the tests, also where that is killed.
    until_here = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [*until_here, *words], env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )


def _end(daemons: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """The nodes first, and munge last."""
    for name in reversed(daemons):
        daemons[name].terminate()
        try:
            daemons[name].wait(10)
        except subprocess.TimeoutExpired:
            daemons[name].kill()
            daemons[name].wait()


def _processes_of(node: str) -> list[int]:
    """What Slurm has started on a node: tasks know its name, and their keepers are their ancestors."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if f"\0SLURMD_NODENAME={node}\0".encode() in b"\0" + (folder / "environ").read_bytes():
                process = int(folder.name)
                found.add(process)
                while (process := _parent_of(process)) and "slurmstepd" in _command_of(process):
                    found.add(process)
    return sorted(found - {os.getpid()})


def _parent_of(process: int) -> int:
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


def _command_of(process: int) -> str:
    return (Path("/proc") / str(process) / "cmdline").read_bytes().decode(errors="replace")


def _until(is_so: Callable[[], object], problem: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, problem
        time.sleep(0.1)
