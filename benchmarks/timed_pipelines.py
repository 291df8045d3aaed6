"""The real executor on timed devices: measured steps over simulated ones, beside torch.distributed.pipelining.

Every rank is a process whose stages wait for 50 ms each of F, I and W (a chunk for its share) in place of computing, so
that 8 ranks run on 2 cores; where there is a core for each they wait busily. What a step takes beyond the simulated one
is what executor and transport cost. torch's schedules run the same stages. Efficiency is the compute of the busiest
rank over the step.

    python benchmarks/timed_pipelines.py                  both sizes, everything: about 10 minutes
    python benchmarks/timed_pipelines.py --quick          the best few
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from record import record
from torch.distributed import pipelining

from shardwise.execution.pipeline import complete
from shardwise.execution.process import ProcessExecutor
from shardwise.ranks.faults import Watch
from shardwise.ranks.links import make_groups
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.transport import ProcessTransport
from shardwise.schedule.auto.search import auto
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.states.buckets.ties import make_ties
from shardwise.testing.timed import (
    Seconds,
    TimedModule,
    first_stage_waits_in_weights,
    sleep,
    spin,
    square_of,
    timed_batch,
    timed_split,
)

UNIT = 0.050
SLOWER = 1.5
# What `auto` is told that a message takes. Simulated steps, which measured ones are held against, take it for nothing.
HOP = 0.0005
MOST_OVER_SIMULATED = {4: 1.02, 8: 1.03}
MOST_MICROSECONDS = 150

OURS = [name for name in CATALOGUE if name != "pipedream-2bw"] + ["auto"]
OUR_FEW = ["zb-h2", "zb-v", "dualpipe-v", "auto"]
THEIRS = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "vee",
    "DualPipeV": "vee",
}
THEIR_FEW = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ranks, microbatches, and how much longer than usual each rank takes for everything."""

    microbatches: int
    slowness: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.slowness)

    def seconds(self, rank: int, share: float) -> Seconds:
        return Seconds(UNIT, UNIT, UNIT).times(self.slowness[rank] * share)

    @property
    def busiest(self) -> float:
        return 3 * UNIT * self.microbatches * max(self.slowness)

    @property
    def times(self) -> tuple[StageTimes, ...]:
        return tuple(
            StageTimes(forward=x * UNIT, input_gradient=x * UNIT, weight_gradient=x * UNIT) for x in self.slowness
        )


def make(name: str, setup: Setup) -> Schedule:
    if name != "auto":
        return make_schedule(name, setup.ranks, setup.microbatches)
    # What ZB-H2 may hold, so that `auto` has no less than the best of the others.
    memory = (float(2 * setup.ranks),) * setup.ranks
    return auto(
        Question(
            num_ranks=setup.ranks, num_microbatches=setup.microbatches, times=setup.times, hops=(HOP,), memory=memory
        )
    )


def simulated(schedule: Schedule, setup: Setup) -> float:
    """Seconds of a step where nothing but compute takes time."""
    prices = stage_prices(schedule.placement, setup.times)
    count = len(schedule.placement.pipes[0])
    return simulate(lower(schedule), first_stage_waits_in_weights(prices, count)).makespan


# What ranks run.


class _Clock:
    """The waits of a rank, which the first step skips: it is there to open connections and agree on shapes."""

    def __init__(self, num_ranks: int) -> None:
        self.runs = False
        # Where there is a core for each rank it is kept, and one for all else.
        self._wait = spin if len(os.sched_getaffinity(0)) > num_ranks else sleep

    def wait(self, seconds: float, kind: Kind) -> None:
        if self.runs:
            self._wait(seconds, kind)


def _spans(step: Callable[[], object], clock: _Clock, num_steps: int) -> list[Span]:
    """When this rank began and ended each step, on the clock that all processes of a machine share."""
    spans = []
    for number in range(num_steps + 1):
        clock.runs = number > 0
        start = _start_together()
        step()
        spans.append((start, perf_counter()))
    return spans[1:]


def _keep_to_a_core() -> None:
    """Where ranks share cores, let each stay on one: there it finds its caches, if not warm, then not empty."""
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() > len(cores) > 1:
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})


def _start_together() -> float:
    """Wait for a moment that all ranks agree on: they leave a barrier milliseconds apart."""
    moment = torch.tensor(perf_counter() + 0.02, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    sleep(float(moment) - perf_counter(), Kind.F)
    return float(moment)


class _Ours:
    """One rank of our executor over timed stages."""

    def __init__(self, schedule: Schedule, seconds: Seconds, name: str) -> None:
        self.rank, self.clock = dist.get_rank(), _Clock(schedule.num_ranks)
        split = timed_split([seconds] * len(schedule.placement.pipes[0]), wait=self.clock.wait)
        self.schedule = complete(schedule, split)
        self._parameters = {name: each for stage in split.stages if stage for name, each in stage.parameters.items()}
        self.watch = Watch(self.rank, schedule.num_ranks, name=name)
        self._ties = make_ties(self.schedule.placement, split, [range(schedule.num_ranks)], self.rank)
        self._sums: dict[int, list[dist.Work]] = {}
        self.transport = ProcessTransport(make_groups([range(schedule.num_ranks)]), watch=self.watch)
        self.executor = ProcessExecutor(
            self.rank,
            self.schedule,
            split,
            square_of,
            transport=self.transport,
            on_reduce=self._reduce,
            watch=self.watch,
        )
        self.batch = timed_batch(schedule.num_microbatches)

    def step(self, record: Any = None) -> None:
        self.executor.run(self.batch, signature="timed", record=record)
        for work in [each for works in self._sums.values() for each in works]:
            self.watch.wait(work, "the reduction of a tie")
        self._sums.clear()

    def _reduce(self, instruction: Instruction) -> None:
        """Begin to sum what a tie shares, once: its stages on this rank have one tensor."""
        tie = instruction.peer
        if tie is None or tie in self._sums or self._ties[tie].group.handle is None:
            return
        found = [self._parameters[name] for name in self._ties[tie].names if name in self._parameters]
        for each in found:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        group = self._ties[tie].group.handle
        works = [dist.all_reduce(each.grad, group=group, async_op=True) for each in found]
        self._sums[tie] = [work for work in works if work is not None]

    def close(self) -> None:
        dist.barrier()
        self.transport.close()
        self.watch.close()


def run_ours(schedule: Schedule, setup: Setup, num_steps: int, name: str) -> list[Span]:
    _keep_to_a_core()
    seconds = setup.seconds(dist.get_rank(), schedule.placement.share)
    rank = _Ours(schedule, seconds, name)
    spans = _spans(rank.step, rank.clock, num_steps)
    rank.close()
    return spans


def run_theirs(name: str, setup: Setup, num_steps: int) -> list[Span]:
    _keep_to_a_core()
    rank, ranks, clock = dist.get_rank(), setup.ranks, _Clock(setup.ranks)
    way = THEIRS[name]
    mine = {"one": [rank], "loop": [rank, ranks + rank], "vee": [rank, 2 * ranks - 1 - rank]}[way]
    count = ranks * len(mine)
    seconds = setup.seconds(rank, 1 / len(mine))
    example = torch.zeros(1, 8)
    stages = [
        pipelining.PipelineStage(
            TimedModule(seconds, is_first=number == 0, wait=clock.wait), number, count, torch.device("cpu"), example
        )
        for number in mine
    ]
    cls = getattr(pipelining.schedules, f"Schedule{name}")
    schedule = cls(stages[0] if way == "one" else stages, setup.microbatches, loss_fn=lambda out, _: square_of(out))
    value = torch.zeros(setup.microbatches, 8)

    def step() -> None:
        given = (value,) if 0 in mine else ()
        target = {"target": value, "losses": []} if count - 1 in mine else {}
        schedule.step(*given, return_outputs=False, **target)

    return _spans(step, clock, num_steps)


def run_idle(schedule: Schedule, num_steps: int, name: str) -> dict[str, list[float]]:
    """Microseconds of each instruction where stages take no time; a wait for another rank is not counted."""
    rank = _Ours(schedule, Seconds(0.0, 0.0, 0.0), name)
    found = defaultdict(list)

    def note(_: int, instruction: Instruction, start: float, end: float) -> None:
        found[instruction.kind.value].append(1e6 * (end - start))

    rank.step()
    for _ in range(num_steps):
        dist.barrier()
        rank.step(note)
    rank.close()
    return dict(found)


# What is made of it.


def step_of(spans: list[list[Span]]) -> float:
    """The median step: from the first rank's start to the last rank's end."""
    return median(max(end for _, end in step) - min(start for start, _ in step) for step in zip(*spans, strict=True))


def measure(setup: Setup, ours: list[str], theirs: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Each on ranks of its own: what one leaves behind is not for the next to carry."""
    rows = []
    slow = max(setup.slowness) > 1
    title = f"{setup.ranks} x {setup.microbatches}{', one slower' if slow else ''}"
    for who, names in (("shardwise", ours), ("torch", theirs)):
        for name in names:
            row: dict[str, Any] = {"setup": title, "of": who, "schedule": name}
            if who == "shardwise":
                schedule = make(name, setup)
                with Ranks(setup.ranks) as ranks:
                    step = step_of(ranks.run(run_ours, schedule, setup, num_steps, f"{title}/{name}"))
                row |= {"step": step, "simulated": simulated(schedule, setup)}
                row["over_simulated"] = step / row["simulated"]
            else:
                # What fails takes its connections with it.
                try:
                    with Ranks(setup.ranks) as others:
                        step = step_of(others.run(run_theirs, name, setup, num_steps))
                except RankError as error:
                    rows.append({**row, "failed": error.problem.partition("\n")[0]})
                    print(f"{title:18} {who:9} {name:22} {rows[-1]['failed']}", flush=True)
                    continue
                row["step"] = step
            row["efficiency"] = setup.busiest / step
            rows.append(row)
            over = f"  / simulated {row['over_simulated']:.4f}" if "over_simulated" in row else ""
            print(f"{title:18} {who:9} {name:22} {step:7.4f} s  efficiency {row['efficiency']:.4f}{over}", flush=True)
    return rows


def best(rows: list[dict[str, Any]], setup: str, who: str) -> float:
    found = (row["efficiency"] for row in rows if row["setup"] == setup and row["of"] == who and "efficiency" in row)
    return max(found, default=float("nan"))


def idle_cost() -> dict[str, float]:
    """Microseconds of an instruction, median over two ranks' steps."""
    with Ranks(2) as ranks:
        found: dict[str, list[float]] = defaultdict(list)
        for name in ("1f1b", "zb-v"):
            for rank in ranks.run(run_idle, make_schedule(name, 2, 16), 20, f"idle/{name}"):
                for kind, times in rank.items():
                    found[kind] += times
    return {
        "median": median(chain(*found.values())),
        **{kind: median(times) for kind, times in found.items()},
    }


def keep(rows: list[dict[str, Any]], idle: dict[str, float]) -> list[dict[str, Any]]:
    """Print and record what there is so far; return what is over its limit."""
    titles = list(dict.fromkeys(row["setup"] for row in rows))
    ratios = {title: best(rows, title, "shardwise") / best(rows, title, "torch") for title in titles}
    for title, ratio in ratios.items():
        print(f"{title:18} best of ours over torch's best efficiency: {ratio:.4f}")
    limits = {f"{size} x {2 * size}": limit for size, limit in MOST_OVER_SIMULATED.items()}
    late = [row for row in rows if row.get("over_simulated", 0) > limits.get(row["setup"], float("inf"))]
    for row in late:
        print(f"over its limit: {row['setup']} {row['schedule']} {row['over_simulated']:.4f}")
    record(
        "timed_pipelines",
        {
            "unit_seconds": UNIT,
            "limits": {"over_simulated": limits, "microseconds": MOST_MICROSECONDS},
            "microseconds": idle,
            "rows": rows,
            "best_efficiency_over_torch": ratios,
        },
    )
    return late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only the best few schedules")
    parser.add_argument("--alone", action="store_true", help="without torch's, whose gloo may lack what theirs need")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each, of which the median counts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    given = parser.parse_args()
    theirs = [] if given.alone else THEIR_FEW if given.quick else list(THEIRS)
    idle = idle_cost()
    print("microseconds an instruction:", {kind: round(value, 1) for kind, value in idle.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    late: list[dict[str, Any]] = []
    for size in given.ranks:
        even = Setup(microbatches=2 * size, slowness=(1.0,) * size)
        slow = Setup(
            microbatches=2 * size, slowness=tuple(SLOWER if rank == size // 2 else 1.0 for rank in range(size))
        )
        rows += measure(even, OUR_FEW if given.quick else OURS, theirs, given.steps)
        rows += measure(slow, OUR_FEW, [each for each in THEIR_FEW if each in theirs], given.steps)
        late = keep(rows, idle)
    return int(bool(late) or idle["median"] > MOST_MICROSECONDS)


if __name__ == "__main__":
    sys.exit(main())
