"""How long the slow things take: `auto` on large settings, and `shardwise schedule` from process start to end."""

import subprocess
import sys
from statistics import median
from time import perf_counter

from record import record

from shardwise.schedule.outcome import make
from shardwise.schedule.question import make_question


def auto_seconds(num_ranks: int, num_microbatches: int, memory: float | None) -> float:
    question = make_question(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        times="1,1.2,0.8",
        hop="0.05",
        memory=None if memory is None else str(memory),
    )
    start = perf_counter()
    make("auto", question)
    return perf_counter() - start


def command_seconds(name: str) -> float:
    command = [sys.executable, "-m", "shardwise", "schedule", name, "--stages", "8", "--microbatches", "32"]
    seconds = []
    for _ in range(7):
        start = perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(perf_counter() - start)
    return median(seconds)


def main() -> int:
    figures = [
        *((f"auto, p = 8, m = 64, memory {memory}", auto_seconds(8, 64, memory), 2.0) for memory in (6, 8, 16, None)),
        *((f"auto, p = 32, m = 256, memory {memory}", auto_seconds(32, 256, memory), 60.0) for memory in (20, 64)),
        *((f"shardwise schedule {name}, p = 8, m = 32", command_seconds(name), 0.3) for name in ("1f1b", "zb-v")),
    ]
    for title, seconds, limit in figures:
        print(f"{title:45} {seconds:8.3f} s   at most {limit:g} s   {'holds' if seconds <= limit else 'DOES NOT HOLD'}")
    record("speed", {title: {"seconds": seconds, "limit": limit} for title, seconds, limit in figures})
    return 0 if all(seconds <= limit for _, seconds, limit in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
