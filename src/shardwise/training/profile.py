"""A profile of a few training steps: every instruction on every rank, and on a GPU every kernel and copy.

Only the inputs of a report are saved. The trace is that of the step of median duration.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from shardwise import environment
from shardwise.engine.engine import Engine
from shardwise.errors import os_errors_as
from shardwise.execution.collector import StreamCollector
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.spawn import Ranks
from shardwise.trace.events import Trace
from shardwise.trace.run import Run
from shardwise.training.data.rows import Prefetcher
from shardwise.training.folder import make_folder, manifest_of, own_folder, save_step
from shardwise.training.job import Job
from shardwise.training.machine_check import check_gpus
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup, check_inputs, make_ready, on_device
from shardwise.training.world import World

#: Warm-up steps, which allocate memory and select kernels. They are not measured.
_WARM_UP = 2
#: Messages to measure a link with, and the bytes of a large one.
_MESSAGES, _LARGE = 8, 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements. `step_seconds` are of steps without a trace, `traced_seconds` of steps with one.

    `cut` describes how the module was split. `reading_seconds` is the time to start the GPU profiler and to read its
    results, outside of a traced step; 0 without a GPU. `link` has the seconds of a tiny message between the first two
    ranks, and the bytes/s of a large one.
    """

    trace: Trace
    step_seconds: tuple[float, ...]
    traced_seconds: tuple[float, ...]
    tokens: int
    flops: float
    num_ranks: int
    cut: dict[str, Any]
    device: str
    data: dict[str, Any]
    reading_seconds: float = 0.0
    link: tuple[float, float] | None = None

    @property
    def tracing_cost(self) -> float:
        """The overhead of tracing, as a share of a step. It may be below 0, within noise."""
        return median(self.traced_seconds) / median(self.step_seconds) - 1


def measure(job: Job, num_devices: int, num_steps: int, *, gpus: Gpus = "own") -> Measured | None:
    """Measure some steps of a job. Under `torchrun`, all ranks but the first return None."""
    check_inputs(job)
    check_gpus(job, num_devices, gpus)
    make_folder(job.folder)
    if environment.place_under_torchrun() is not None:
        with environment.seated(job.seats):
            return measure_rank(job, num_steps)
    with own_folder(job.folder, is_owner=True), environment.seated(job.seats):
        if num_devices == 1:
            return measure_rank(job, num_steps)
        with Ranks(num_devices, gpus=gpus) as ranks:
            found: Measured | None = ranks.run(measure_rank, job, num_steps)[0]
    return found


def measure_rank(job: Job, num_steps: int) -> Measured | None:
    """Measure on one rank. Only the first returns a result."""
    with ExitStack() as stack:
        world = World()
        stack.enter_context(world.telling())
        if world.is_first:
            make_folder(job.folder)
            stack.enter_context(own_folder(job.folder, is_owner=environment.place_under_torchrun() is not None))
        progress = Progress(speaks=world.is_first)
        if job.said is not None:
            progress.say(job.said)
        world.wait()
        setup = make_ready(job, world)
        with setup.engine:
            found = _measure(job, world, setup, num_steps, progress)
        world.wait()
        world.close()
    return found if world.is_first else None


def _measure(job: Job, world: World, setup: Setup, num_steps: int, progress: Progress) -> Measured:
    """Alternate steps without and with a trace, so that disturbances affect both equally."""
    engine = setup.engine
    plain, traced, reading = list[float](), list[tuple[float, Trace]](), list[float]()
    first, count = setup.step, _WARM_UP + 2 * num_steps + 1
    ahead = Prefetcher(setup.batches.at, first, first + count, pins=world.device.type == "cuda")
    with ahead, progress.bar(0, num_steps):
        for _ in range(_WARM_UP):
            engine.train_step(on_device(ahead.next(), world))
        # The first traced step starts the GPU profiler, which takes seconds.
        _traced(engine, ahead, world)
        for _ in range(num_steps):
            plain.append(_timed(engine, ahead, world))
            seconds, trace, cost = _traced(engine, ahead, world)
            traced.append((seconds, trace))
            reading.append(cost)
            progress.step(len(plain), num_steps, None)
    middle = sorted(traced, key=lambda each: each[0])[len(traced) // 2][1]
    tokens = job.recipe.batch * job.recipe.data.sequence
    return Measured(
        trace=middle,
        step_seconds=tuple(plain),
        traced_seconds=tuple(seconds for seconds, _ in traced),
        tokens=tokens,
        flops=setup.flops_per_token * tokens,
        num_ranks=world.size,
        cut=engine.split.as_data,
        device=world.device.type,
        data={key: setup.data[key] for key in ("digest", "source")},
        reading_seconds=median(reading),
        link=_measure_link(world),
    )


def _measure_link(world: World) -> tuple[float, float] | None:
    """Return latency and bytes/s of round trips between the first two ranks, in their own group; the others wait."""
    found = None
    world.wait()
    pair = world.guarded(dist.new_group([0, 1])) if world.size > 1 else None  # Every rank of the world makes it.
    if pair is not None and world.rank < 2:
        latency = _way_seconds(world, pair, 8)
        found = latency, _LARGE / max(_way_seconds(world, pair, _LARGE) - latency, 1e-9)
    world.wait()
    return found


def _way_seconds(world: World, pair: dist.ProcessGroup, num_bytes: int) -> float:
    """Return the seconds of one way: half of the fastest round trip."""
    message, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device), []
    for _ in range(_MESSAGES):
        start = perf_counter()
        for is_send in (world.is_first, not world.is_first):
            kind = dist.isend if is_send else dist.irecv
            # As a batch: for a single send NCCL would make another connection.
            (work,) = dist.batch_isend_irecv([dist.P2POp(kind, message, group=pair, group_peer=1 - world.rank)])
            work.wait()
        _finish(world)
        seconds.append((perf_counter() - start) / 2)
    return min(seconds)


def _timed(engine: Engine, ahead: Prefetcher, world: World) -> float:
    """Return the seconds of a step, from the request of its batch on."""
    world.wait()
    start = perf_counter()
    engine.train_step(on_device(ahead.next(), world))
    _finish(world)
    return perf_counter() - start


def _traced(engine: Engine, ahead: Prefetcher, world: World) -> tuple[float, Trace, float]:
    """Return the seconds of a step with a trace (and GPU streams), the trace, and the cost of profiling the GPU."""
    streams = StreamCollector(world.device) if world.device.type == "cuda" else None
    world.wait()
    if streams is not None:
        streams.start()
        world.wait()
    start = perf_counter()
    batch = on_device(ahead.next(), world)
    engine.train_step(batch, trace=True, data_wait=perf_counter() - start, streams=streams)
    end = perf_counter() if streams is None else streams.ended
    trace = engine.trace
    assert trace is not None, "the step was recorded"
    return end - start, trace, 0.0 if streams is None else streams.cost_seconds


def _finish(world: World) -> None:
    """Wait for all work of the GPU."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def write_run(job: Job, measured: Measured) -> Run:
    """Write the folder of a profile, for `shardwise report` and `shardwise doctor`. Return it as they read it."""
    manifest = manifest_of(job, measured.data, measured.num_ranks)
    manifest |= {
        "step_seconds": median(measured.step_seconds),
        "tokens_per_second": measured.tokens / median(measured.step_seconds),
        "steps_measured": len(measured.step_seconds),
        **measured.cut,
        "predicted": "the schedule, played with the usual time of each instruction",
    }
    with os_errors_as(f"the profile cannot be written to {job.folder}", remedy="--folder FOLDER, another one"):
        return save_step(job, measured.trace, manifest)
