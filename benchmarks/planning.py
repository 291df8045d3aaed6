"""How fast planning is: a large search from process start to end, candidates a second, and `fit`.

Limits are for the processor's time of one core, which a busy machine stretches less than it does the clock's; both are
kept.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter, process_time

import numpy as np
from record import record

from shardwise.cluster.cluster import Cluster
from shardwise.cost.layouts import Layouts
from shardwise.cost.step import price
from shardwise.model.catalogue import get_model

_LARGE = ("plan", "llama3.1-405b", "--cluster", "128x8xh100", "--batch", "2048", "--sequence", "8192")
_COMMANDS = {
    "plan llama3.1-405b on 1024 H100": (_LARGE, 2.0),
    "the same, with all that engines do not run yet": ((*_LARGE, "--any-engine"), None),
    "plan deepseek-v3 on 256 H100": (
        ("plan", "deepseek-v3", "--cluster", "32x8xh100", "--batch", "1024", "--sequence", "4096"), None,
    ),
    "fit llama3.1-405b on 1024 H100": (
        ("fit", "llama3.1-405b", "--cluster", "128x8xh100", "--batch", "2048", "--sequence", "8192", "--plan",
         "dp=8,tp=8,pp=16,microbatches=256,zero=1,precision=bf16,recompute=full,sp=true"), 0.3,
    ),
    "fit llama3-8b on 8 H100": (
        ("fit", "llama3-8b", "--cluster", "8xh100", "--plan", "dp=4,tp=2,zero=1,microbatches=4,precision=bf16"), 0.3,
    ),
}  # fmt: skip
_FIRST = "fit llama3-8b on 8 H100"
_LEAST_RATE = 20_000


def command_seconds(words: tuple[str, ...], repeats: int, cache: str) -> tuple[float, float, dict[str, object]]:
    """The median times of a command, the processor's and the clock's, from process start to end, and its answer."""
    seconds, clock, answer = [], [], {}
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # As an installed package: compiled once, whatever the environment says of that.
    one_core |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
    subprocess.run(
        [sys.executable, "-m", "shardwise", *_COMMANDS[_FIRST][0], "--json"], capture_output=True, env=one_core
    )
    for _ in range(repeats):
        start, before = perf_counter(), _children_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words, "--json"], capture_output=True, text=True, env=one_core
        )
        clock.append(perf_counter() - start)
        seconds.append(_children_seconds() - before)
        answer = json.loads(done.stdout)
    return median(seconds), median(clock), answer


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def candidates_per_second(count: int = 100_000) -> float:
    """Candidates of all kinds priced in one call, in full: seconds, interval, every part of memory."""
    chance = np.random.default_rng(0)
    tp, pp = chance.choice([1, 2, 4, 8], count), chance.choice([1, 2, 4, 8, 16], count)
    layouts = Layouts.of(
        tp=tp, pp=pp, dp=1024 // (tp * pp), microbatch=chance.choice([1, 2, 4], count),
        num_microbatches=chance.choice([16, 32, 64], count), zero=chance.integers(0, 4, count),
        recompute=chance.integers(0, 3, count), schedule=chance.integers(0, 2, count), balance=2,
        sequence_parallel=(tp > 1) & chance.choice([False, True], count),
    )  # fmt: skip
    model, cluster = get_model("llama3.1-405b"), Cluster.parse("128x8xh100")
    start = process_time()
    price(model, cluster, layouts, sequence=8192)
    return count / (process_time() - start)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many runs is kept")
    repeats = parser.parse_args().repeats
    results: dict[str, object] = {"repeats": repeats}
    holds = True
    cache = tempfile.mkdtemp()
    for title, (words, limit) in _COMMANDS.items():
        seconds, clock, answer = command_seconds(words, repeats, cache)
        is_within = limit is None or seconds <= limit
        holds &= is_within
        results[title] = {
            "processor_seconds": seconds,
            "clock_seconds": clock,
            "limit": limit,
            **{key: answer.get(key) for key in ("plan", "seconds", "candidates")},
        }
        wanted = "" if limit is None else f"at most {limit:g} s   {'holds' if is_within else 'DOES NOT HOLD'}"
        print(f"{title:50} {seconds:6.2f} s ({clock:.2f} s on the clock)   {wanted}")
    rate = median(candidates_per_second() for _ in range(repeats))
    holds &= rate >= _LEAST_RATE
    results["candidates priced a second"] = {"rate": rate, "least": _LEAST_RATE}
    print(f"{'candidates priced a second':50} {rate:,.0f}   at least {_LEAST_RATE:,}")
    record("planning", results)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
