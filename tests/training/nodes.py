"""Agents of `torchrun` as machines: each has a name, a rank and memory of its own, and is lost with all of these."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.copies.memory import find_id, memory_of
from shardwise.trace.journal import read_journal
from shardwise.trace.metrics import read_metrics
from tests.ports import free_port
from tests.training.programs import STEADY

ROOT = Path(__file__).parents[2]
#: Who does not answer for some seconds is gone, and others are waited for no longer than four.
MEETING = "keep_alive_interval=2,keep_alive_max_attempt=8,last_call_timeout=4"


def train_words(folder: Path, plan: str, *, copies_every: int = 2, **changes: Any) -> list[str]:
    """What every rank runs."""
    entries = {**STEADY, **{key.replace("__", "."): value for key, value in changes.items()}}
    sets = [word for key, value in entries.items() for word in ("--set", f"{key}={value}")]
    return ["train", "tiny", "--plan", plan, *sets, "--copies-every", str(copies_every), "--folder", str(folder)]


class Nodes:
    """The machines of one run. The first one has the store where all of them meet, and stays."""

    def __init__(
        self, folder: Path, words: Sequence[str], *, fewest: int, most: int, ranks: int = 1, meeting: str = MEETING
    ) -> None:
        self.folder, self._words, self._range, self._port = folder, list(words), f"{fewest}:{most}", free_port()
        self._ranks, self._meeting = ranks, meeting
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str) -> None:
        is_host = int(not self.agents)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", self._range,
            "--nproc-per-node", str(self._ranks), "--max-restarts", "1000",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}",
            "--rdzv-id", "nodes", "--rdzv-conf", f"{self._meeting},is_host={is_host}", "-m", "shardwise", *self._words,
        ]  # fmt: skip
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NODE_NAME": name}
        # Else a machine that comes later waits for an address that the others have noted once, and not for it.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"{name}.out").open("ab") as log:
            self.agents[name] = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def places(self) -> dict[str, int]:
        """The process of each node's rank, by the last start."""
        starts = [each for each in read_journal(self.folder) if each["event"] == "start"]
        return {place["host"]: place["process"] for place in starts[-1]["places"]} if starts else {}

    def lose(self, name: str) -> None:
        """A machine is gone: its agent, its rank, its keeper, and what was in its memory."""
        agent = self.agents.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
        kill(self.places().get(name, 0))
        memory = memory_of(find_id(self.folder) or "none", name)
        keeper = self.folder / "copies" / f"{name}.json"
        for process in processes_with(f"--node {name}", str(self.folder)):
            kill(process)
        shutil.rmtree(memory.folder, ignore_errors=True)
        keeper.unlink(missing_ok=True)

    def starts(self) -> list[dict[str, Any]]:
        return [dict(each) for each in read_journal(self.folder) if each["event"] == "start"]

    def step(self) -> int:
        return max((row["step"] for row in read_metrics(self.folder)), default=0)

    def wait(self, until: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, self.said()
            assert any(agent.poll() is None for agent in self.agents.values()), self.said()
            time.sleep(0.02)

    def join(self, seconds: float = 300) -> list[int]:
        return [agent.wait(seconds) for agent in self.agents.values()]

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.out")))

    def close(self) -> None:
        """End all that is left of it."""
        for name in list(self.agents):
            self.lose(name)
        for process in processes_with(str(self.folder)):
            kill(process)


def kill(process: int) -> bool:
    """Whether there was such a process."""
    try:
        if process:
            os.kill(process, signal.SIGKILL)
        return bool(process)
    except ProcessLookupError:
        return False


def processes_with(*words: str) -> list[int]:
    """Those whose command lines have all of these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words) and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
