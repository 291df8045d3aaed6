"""Faults of runs on GPUs whose streams were seen, each with the doctor's word for it; and runs without any."""

from dataclasses import replace

from shardwise.trace.activities import Activity, ActivityKind
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.run import Run
from tests.explain.doctor.patients import Make, a_run
from tests.trace.devices import COPY_STREAM, PAGEABLE, gpu_step


def on_gpus(trace: Trace, plan: str = "dp=2", **facts: str) -> Run:
    return replace(a_run(trace, plan), facts=facts)


def with_batch_copied(trace: Trace, seconds: float, name: str) -> Trace:
    """A step that begins with waiting for its batch, which is being copied all the while."""
    events, activities = list(trace.events), list(trace.activities)
    for rank in range(trace.num_ranks):
        events.append(Event("batch", rank, Lane.DATA, -seconds, 0.0, -1, 0))
        kind = ActivityKind.HOST_TO_DEVICE
        activities.append(Activity(rank, COPY_STREAM, kind, name, -seconds, 0.0, -seconds))
    windows = tuple((-seconds, end) for _, end in trace.windows)
    return replace(trace, events=tuple(events), activities=tuple(activities), windows=windows)


GPU_FAULTS: dict[str, tuple[str, Make]] = {
    # The step without a fault is 122 ms: 244 kernels of half a millisecond.
    "idle before every kernel": ("host bound", lambda: on_gpus(gpu_step(idle=100e-6))),
    "idle before every kernel, one rank": (
        "host bound",
        lambda: on_gpus(gpu_step(num_ranks=1, idle=150e-6, num_microbatches=1), "dp=1", batch="16"),
    ),
    "a host that stalls in every forward": ("host bound", lambda: on_gpus(gpu_step(stall=0.006))),
    "kernels of three microseconds": (
        "tiny kernels",
        lambda: on_gpus(gpu_step(kernel=3e-6, idle=5e-6, num_kernels=400)),
    ),
    "kernels of two microseconds, one after the other": (
        "tiny kernels",
        lambda: on_gpus(gpu_step(num_ranks=1, kernel=2e-6, gap=1.5e-6, num_kernels=400, num_microbatches=1), "dp=1"),
    ),
    "a sum after the backward": ("exposed sum", lambda: on_gpus(gpu_step(exposed_sum=0.020))),
    "a sum half hidden": ("exposed sum", lambda: on_gpus(gpu_step(exposed_sum=0.015, hidden_sum=0.020))),
    "a sum that one rank comes late to": ("exposed sum", lambda: on_gpus(gpu_step(exposed_sum=0.020, late=0.004))),
    "pinned copies that are waited for": ("exposed copies", lambda: on_gpus(gpu_step(copy=0.005))),
    "offloaded weights that are waited for": (
        "exposed copies",
        lambda: on_gpus(gpu_step(copy=0.008, hidden_copy=0.004), "dp=2,offload.parameters=1"),
    ),
    "pageable copies": ("pageable copies", lambda: on_gpus(gpu_step(copy=0.005, copy_name=PAGEABLE))),
    "a pageable batch": ("pageable copies", lambda: on_gpus(with_batch_copied(gpu_step(), 0.020, PAGEABLE))),
    "activations back from pageable memory": (
        "pageable copies",
        lambda: on_gpus(gpu_step(copy=0.004, copy_name="Memcpy DtoH (Device -> Pageable)")),
    ),
    "a stream that the computation waits for": (
        "late stream",
        lambda: on_gpus(gpu_step(num_ranks=1, side=0.004), "dp=1"),
    ),
    "a side stream in few large backwards": (
        "late stream",
        lambda: on_gpus(gpu_step(num_ranks=1, side=0.020, num_microbatches=1, num_kernels=80), "dp=1"),
    ),
}

GPU_HEALTHY: dict[str, Make] = {
    "a busy device": lambda: on_gpus(gpu_step()),
    "one device": lambda: on_gpus(gpu_step(num_ranks=1), "dp=1"),
    "gaps of a microsecond": lambda: on_gpus(gpu_step(gap=2e-6)),
    "a hidden sum": lambda: on_gpus(gpu_step(hidden_sum=0.030, exposed_sum=0.002)),
    "hidden copies": lambda: on_gpus(gpu_step(hidden_copy=0.006)),
    "small copies": lambda: on_gpus(gpu_step(copy=0.0002, copy_name=PAGEABLE)),
    "a host that is hardly late": lambda: on_gpus(gpu_step(idle=10e-6)),
    "a side stream for a moment": lambda: on_gpus(gpu_step(side=0.0005)),
}
