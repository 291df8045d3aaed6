"""SIGSTOP of a random rank of `shardwise train` at random moments: do the others say who, within 30 s?

Each run has two processes and a checkpoint every other step, under one of several plans; some are started by
`torchrun`. At a random moment, from before its ranks have joined on, one rank is stopped and stays so. What is measured
is the time from there until an error was told that names that rank. Four run at a time: they do little but wait.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import record

from shardwise.trace.metrics import read_metrics

NUM_STOPS, AT_A_TIME, WITHIN_SECONDS = 20, 4, 30.0
PLANS = ("dp=2", "dp=2,zero=3", "pp=2,microbatches=2", "tp=2")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
#: Every so many-th is started by torchrun.
LAUNCHED_EVERY = 5


def start(folder: Path, plan: str, *, is_launched: bool) -> subprocess.Popen[str]:
    changes = ("steps=100000", "checkpoint.every=2", "evaluation.every=3", "evaluation.sample=0", "log=2")
    words = ["shardwise", "train", "tiny", "--plan", plan, "--folder", str(folder)]
    words += [word for each in changes for word in ("--set", each)]
    command = [sys.executable, "-m", *(TORCHRUN if is_launched else ()), *words]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    # To a file and not to a pipe: whoever waits for its end would wait for a rank that is stopped and has it open.
    with (folder.parent / f"{folder.name}.err").open("w") as errors:
        return subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def ranks_of(process: int, *, is_launched: bool) -> list[int]:
    """The ranks: children of torchrun, or of the server that forks them, of which there is one beside a tracker."""
    if is_launched:
        return children(process)
    return [rank for child in children(process) for rank in children(child)]


def named(text: str, rank: int) -> bool:
    return re.search(rf"rank {rank} (has not answered|is gone|has been at)", text) is not None


def stop_one(number: int, folder: Path) -> dict[str, object]:
    """Start a run, stop a rank of it, and wait for its end."""
    chance = random.Random(number)
    plan, is_launched = PLANS[number % len(PLANS)], number % LAUNCHED_EVERY == LAUNCHED_EVERY - 1
    run = start(folder, plan, is_launched=is_launched)
    try:
        while run.poll() is None and len(ranks := ranks_of(run.pid, is_launched=is_launched)) < 2:
            time.sleep(0.01)
        # A quarter is stopped while ranks begin, the others when some steps are done.
        if number % 4:
            while run.poll() is None and not read_metrics(folder):
                time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 3.0))
        rank = chance.randrange(2)
        os.kill(ranks[rank], signal.SIGSTOP)
        stopped = time.monotonic()
        steps = len(read_metrics(folder))
        errors = folder.parent / f"{folder.name}.err"
        seconds = None
        while time.monotonic() < stopped + 4 * WITHIN_SECONDS:
            # Under torchrun the others have said it when they end; the launcher then waits for the one that is stopped.
            if named(errors.read_text(), rank):
                seconds = time.monotonic() - stopped
                break
            if run.poll() is not None:
                break
            time.sleep(0.05)
        told = errors.read_text().splitlines()
        line = next((each for each in told if named(each, rank)), " | ".join(told[-8:]))
        found = {"plan": plan, "torchrun": is_launched, "rank": rank, "rows_before": steps, "seconds": seconds}
        return {**found, "said": line}
    finally:
        for process in [*ranks_of(run.pid, is_launched=is_launched), run.pid]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.wait()


def main() -> int:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_A_TIME) as pool:
        lock = threading.Lock()

        def one(number: int) -> dict[str, object]:
            found = stop_one(number, Path(name) / f"run-{number}")
            with lock:
                print(found, flush=True)
            return found

        stops = list(pool.map(one, range(NUM_STOPS)))
    seconds = [each["seconds"] for each in stops if isinstance(each["seconds"], float)]
    in_time = sum(each <= WITHIN_SECONDS for each in seconds)
    results = {"stops": NUM_STOPS, "named_in_time": in_time, "longest_seconds": max(seconds, default=None)}
    record("stops", {**results, "each": stops})
    return 0 if in_time == NUM_STOPS else 1


if __name__ == "__main__":
    sys.exit(main())
