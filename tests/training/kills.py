"""Random kills of a run: ranks, those who stand for them, agents, keepers, processes on standby, machines; at any
moment, while a copy is made or while a checkpoint is written. What is killed does not know that it is a test."""

import json
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.copies.memory import find_id, memory_of
from tests.training.nodes import Nodes, kill, processes_with

#: What is killed, and how often beside the others. The first two and the last two end all ranks.
TARGETS = {"rank": 5, "asker": 2, "keeper": 1, "standby": 1, "agent": 1, "node": 2}
MOMENTS = {"any": 3, "copying": 2, "saving": 1}
#: A moment that does not come is not waited for.
_MOMENT_SECONDS = 5.0


@dataclass(kw_only=True)
class Kills:
    """What was done to a run: for each kill, what, when, and how long it took until the next step."""

    nodes: Nodes
    chance: random.Random
    names: tuple[str, ...]
    done: list[tuple[str, str, float]] = field(default_factory=list)

    def one(self) -> None:
        """Kill something, and wait until the run makes steps again."""
        (target,) = self.chance.choices([*TARGETS], [*TARGETS.values()])
        (moment,) = self.chance.choices([*MOMENTS], [*MOMENTS.values()])
        # The first machine has the store where all meet: without it nobody could come back by himself.
        name = self.chance.choice(self.names if target not in ("agent", "node") else self.names[1:])
        self._await(moment)
        begun, num_starts, step = time.monotonic(), len(self.nodes.starts()), self.nodes.step()
        if not self._kill(target, name):
            return
        if target in ("keeper", "standby"):
            self.nodes.wait(lambda: self.nodes.step() > step)
        else:
            self.nodes.wait(lambda: len(self.nodes.starts()) > num_starts)
            again = self.nodes.starts()[-1]["step"]
            self.nodes.wait(lambda: self.nodes.step() > again)
        self.done.append((target, moment, time.monotonic() - begun))

    def summary(self) -> dict[str, object]:
        """Counts, and seconds until the next step of those kills that ended all ranks."""
        seconds = sorted(each for target, _, each in self.done if target not in ("keeper", "standby"))
        sources = Counter(str(each.get("source")) for each in self.nodes.starts()[1:])
        each_took = {
            name: sorted(round(took, 1) for target, _, took in self.done if target == name) for name in TARGETS
        }
        return {
            "kills": len(self.done),
            "seconds to the next step": each_took,
            # Beyond those that kills have caused: an agent was taken for dead that was not.
            "further restarts": sum(sources.values()) - len(seconds),
            "by target": Counter(target for target, _, _ in self.done),
            "by moment": Counter(moment for _, moment, _ in self.done),
            "came back from": sources,
            "median seconds to the next step": round(statistics.median(seconds), 2) if seconds else None,
            "worst": round(seconds[-1], 2) if seconds else None,
        }

    def _await(self, moment: str) -> None:
        deadline = time.monotonic() + _MOMENT_SECONDS
        time.sleep(self.chance.random() * 0.5)
        while moment != "any" and time.monotonic() < deadline and not self._is_at(moment):
            time.sleep(0.001)

    def _is_at(self, moment: str) -> bool:
        with suppress(OSError):
            if moment == "saving":
                return any((self.nodes.folder / "checkpoints").glob("*.saving"))
            for name in self.names:
                pieces = memory_of(find_id(self.nodes.folder) or "none", name).pieces()
                if pieces and len(pieces[max(pieces)]) < max(pieces).num_ranks:
                    return True
        return False

    def _kill(self, target: str, name: str) -> bool:
        nodes = self.nodes
        if target == "node":
            nodes.lose(name)
            nodes.start(name)
            return True
        if target == "agent":
            agent = nodes.agents.pop(name)
            agent.kill()
            agent.wait()
            nodes.start(name)
            return True
        if target == "rank":
            return kill(nodes.places()[name])
        if target == "asker":
            children = Path(f"/proc/{nodes.agents[name].pid}/task/{nodes.agents[name].pid}/children").read_text()
            return kill(int((children.split() or ["0"])[0]))
        if target == "standby":
            # Ranks that were forked from it have its command line too.
            ranks, found = (
                set(nodes.places().values()),
                processes_with("standby.server", f"--node {name} ", str(nodes.folder)),
            )
            return kill(next((process for process in found if process not in ranks), 0))
        with suppress(OSError, ValueError):
            return kill(json.loads((nodes.folder / "copies" / f"{name}.json").read_bytes())["process"])
        return False


def stop(nodes: Nodes) -> None:
    """End a run as launchers do: it saves, and can be compared."""
    for agent in nodes.agents.values():
        agent.send_signal(signal.SIGTERM)
    for agent in nodes.agents.values():
        agent.wait(120)


def forget(nodes: Nodes, memory: Path) -> None:
    nodes.close()
    shutil.rmtree(memory, ignore_errors=True)
