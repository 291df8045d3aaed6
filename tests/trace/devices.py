"""Steps of ranks with GPUs, put together by hand: what a device did is known to the microsecond."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.trace.activities import Activity, kind_of
from shardwise.trace.events import Event, Lane, Trace

COMPUTE_STREAM, NCCL_STREAM, COPY_STREAM, SIDE_STREAM = 7, 20, 14, 31
KERNEL, ALL_REDUCE = (
    "void gemm_kernel<float, 128>(float*, int)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
)
PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
SUM = "a sum of gradients"
#: How long before it runs a kernel is launched, where the host is ahead.
AHEAD = 400e-6


@dataclass
class Device:
    """One rank's GPU while its step is put together. `now` is how far it has come, `ended` when its main stream did."""

    rank: int
    now: float = 0.0
    ended: float = 0.0
    instruction: str = ""
    activities: list[Activity] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def run(self, seconds: float, *, gap: float = 0.0, idle: float = 0.0) -> None:
        """A kernel of the main stream, after a gap in which it is launched already, or idle time in which it is not."""
        start = self.now + gap + idle
        launched = start - 2e-6 if idle else max(self.ended - AHEAD, 0.0)
        self.add(KERNEL, COMPUTE_STREAM, start, start + seconds, launched)
        self.now = self.ended = start + seconds

    def add(
        self, name: str, stream: int, start: float, end: float, launched: float | None = None, *, purpose: str = ""
    ) -> None:
        group = "0 1" if purpose else ""
        kind = kind_of(name)
        self.activities.append(
            Activity(self.rank, stream, kind, name, start, end, launched, self.instruction, purpose, group)
        )

    def begin(self, instruction: str) -> float:
        self.instruction = instruction
        return self.now

    def end(self, begun: float, lane: Lane, microbatch: int) -> None:
        """The instruction has ended that begun then."""
        self.events.append(Event(self.instruction, self.rank, lane, begun, self.now, 0, microbatch))
        self.instruction = ""


def joined_trace(devices: Sequence[Device]) -> Trace:
    """The trace of ranks that all began at once."""
    return Trace(
        name="1f1b",
        num_ranks=len(devices),
        events=tuple(event for device in devices for event in device.events),
        windows=tuple((0.0, max(device.now, *(each.end for each in device.activities))) for device in devices),
        activities=tuple(each for device in devices for each in device.activities),
    )


def gpu_step(
    *,
    num_ranks: int = 2,
    num_microbatches: int = 4,
    num_kernels: int = 20,
    kernel: float = 500e-6,
    gap: float = 1e-6,
    idle: float = 0.0,
    stall: float = 0.0,
    exposed_sum: float = 0.0,
    hidden_sum: float = 0.0,
    copy: float = 0.0,
    copy_name: str = PINNED,
    hidden_copy: float = 0.0,
    side: float = 0.0,
    late: float = 0.0,
) -> Trace:
    """A step of ranks of data parallelism.

    Before each kernel the host is late by `idle`, and once in each forward by `stall`. Gradients are summed for
    `hidden_sum` beside the last backward and for `exposed_sum` after it, of which the last rank comes `late` to the
    step. Each forward waits for a `copy`, while `hidden_copy` goes on beside it; each backward waits for `side` seconds
    of kernels of another stream.
    """
    devices = [Device(rank) for rank in range(num_ranks)]
    last = 0.0
    for device in devices:
        device.now = late if device.rank == num_ranks - 1 else 0.0
        for microbatch in range(num_microbatches):
            begun = device.begin(f"0F{microbatch}")
            if copy:
                device.add(copy_name, COPY_STREAM, device.now, device.now + copy, device.now)
                device.now += copy
            if hidden_copy:
                device.add(PINNED, COPY_STREAM, device.now, device.now + hidden_copy, device.now)
            for number in range(num_kernels):
                device.run(kernel, gap=gap, idle=stall if stall and number == 1 else idle)
            device.end(begun, Lane.COMPUTE, microbatch)
            begun = device.begin(f"0B{microbatch}")
            if side:
                device.add("void side_kernel(float*)", SIDE_STREAM, device.now, device.now + side, device.now)
                device.now += side
            for _ in range(2 * num_kernels):
                device.run(kernel, gap=gap, idle=idle)
            device.end(begun, Lane.COMPUTE, microbatch)
        last = max(last, device.now)
    for device in devices:
        begun = device.begin("0STEP0")
        if exposed_sum or hidden_sum:
            start = device.now - hidden_sum
            device.now = last + exposed_sum
            device.add(ALL_REDUCE, NCCL_STREAM, start, device.now, start - 5e-6, purpose=SUM)
        for _ in range(4):
            device.run(kernel, gap=gap, idle=idle)
        device.end(begun, Lane.STEP, 0)
    return joined_trace(devices)
