"""What torch's profiler has seen of a GPU, as activities: by the host's clock, with their instruction and purpose."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.execution import collector
from shardwise.execution.collector import DeviceEvent, activities_of, device_events, zero_of_clock
from shardwise.execution.recording import Launch, RankTrace, Recording
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import backward, forward
from shardwise.schedule.passes.lower import lower
from shardwise.trace.activities import Activity, ActivityKind
from shardwise.trace.stretches import Part, parts_of_ranks

#: When the host's clock was at zero, in nanoseconds since 1970.
ZERO = 1_700_000_000_000_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def at(microseconds: float) -> int:
    return ZERO + round(microseconds * 1000)


#: A forward and a backward, the sum of what it made, and a copy that nobody launched, as CUPTI tells them.
SEEN = [
    DeviceEvent("cudaLaunchKernel", None, at(110), at(115), 1),
    DeviceEvent("cudaLaunchKernel", None, at(160), at(165), 2),
    DeviceEvent("cuLaunchKernelEx", None, at(212), at(220), 3),
    DeviceEvent("cudaLaunchKernel", None, at(310), at(315), 4),
    DeviceEvent("cudaDeviceSynchronize", None, at(320), at(900), 5),
    DeviceEvent("Activity Buffer Request", None, at(90), at(95), 0),
    DeviceEvent("gemm", 7, at(150), at(350), 1),
    DeviceEvent("gemm_back", 7, at(351), at(551), 2),
    DeviceEvent(ALL_REDUCE, 20, at(400), at(700), 3),
    DeviceEvent("adam", 7, at(701), at(801), 4),
    DeviceEvent("Memcpy DtoH (Device -> Pinned)", 14, at(700), at(820), 99),
]
#: By the host's clock, in seconds.
HANDED_OVER = [(forward(0, 0), 100e-6, 150e-6), (backward(0, 0), 150e-6, 250e-6)]
LAUNCHES = [
    Launch(50e-6, "all_gather", "a gather of parameters", "0 1"),
    Launch(210e-6, "all_reduce", "a sum of gradients", "0 1"),
]


def collected(launches: list[Launch] = LAUNCHES) -> list[Activity]:
    return activities_of(SEEN, rank=1, zero=ZERO, handed_over=HANDED_OVER, launches=launches)


def test_what_ran_is_told_by_the_hosts_clock_in_order() -> None:
    found = collected()
    assert [each.name for each in found] == ["gemm", "gemm_back", ALL_REDUCE, SEEN[-1].name, "adam"]
    assert {each.rank for each in found} == {1}
    assert [each.stream for each in found] == [7, 7, 20, 14, 7]
    assert (found[0].start, found[0].end) == pytest.approx((150e-6, 350e-6))
    assert [each.kind for each in found] == [
        ActivityKind.KERNEL,
        ActivityKind.KERNEL,
        ActivityKind.NCCL,
        ActivityKind.DEVICE_TO_HOST,
        ActivityKind.KERNEL,
    ]


def test_nothing_runs_before_it_was_launched_whatever_the_devices_clock_says() -> None:
    early = [
        each if each.stream is None else each._replace(start=each.start - 70_000, end=each.end - 70_000)
        for each in SEEN
    ]
    found = activities_of(early, rank=1, zero=ZERO, handed_over=HANDED_OVER, launches=LAUNCHES)
    # The first kernel seems to begin 30 us before its launch, so all are told 30 us later: 40 us before they were.
    assert [each.name for each in found] == [each.name for each in collected()]
    for one, other in zip(found, collected(), strict=True):
        assert (one.start, one.end) == pytest.approx((other.start - 40e-6, other.end - 40e-6))
        assert one.launched == other.launched


def test_an_activity_belongs_to_the_instruction_that_it_was_launched_in_not_to_the_one_it_runs_in() -> None:
    found = {each.name: each for each in collected()}
    assert [found[name].instruction for name in ("gemm", "gemm_back", ALL_REDUCE, "adam")] == ["0F0", "0B0", "0B0", ""]
    assert found["gemm_back"].launched == pytest.approx(160e-6)
    assert found[SEEN[-1].name].launched is None


def test_a_collective_is_the_last_of_its_kind_that_was_noted_just_before_it() -> None:
    (found,) = [each for each in collected() if each.kind is ActivityKind.NCCL]
    assert (found.purpose, found.group) == ("a sum of gradients", "0 1")
    for others in ([], LAUNCHES[:1], [LAUNCHES[1]._replace(time=300e-6)], [LAUNCHES[1]._replace(time=-1.0)]):
        (found,) = [each for each in collected(others) if each.kind is ActivityKind.NCCL]
        assert (found.purpose, found.group, found.what) == ("", "", "NCCL all reduce")


def test_a_note_is_for_one_collective_and_what_follows_it_is_another() -> None:
    another = [
        DeviceEvent("cuLaunchKernelEx", None, at(230), at(231), 6),
        DeviceEvent(ALL_REDUCE, 20, at(702), at(705), 6),
    ]
    found = activities_of([*SEEN, *another], rank=0, zero=ZERO, handed_over=HANDED_OVER, launches=LAUNCHES)
    assert [each.purpose for each in found if each.kind is ActivityKind.NCCL] == ["a sum of gradients", ""]


def test_where_launches_were_not_seen_collectives_are_taken_in_order() -> None:
    ran = [each for each in SEEN if each.stream is not None]
    for launches, purpose in ((LAUNCHES, "a sum of gradients"), ([*LAUNCHES, LAUNCHES[1]], "")):
        found = activities_of(ran, rank=0, zero=ZERO, handed_over=HANDED_OVER, launches=launches)
        assert [each.purpose for each in found if each.kind is ActivityKind.NCCL] == [purpose]


def test_the_clock_of_a_host_is_compared_by_the_quickest_of_several_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other processes run meanwhile: readings take 400, 20 and then 900 nanoseconds, and the first is asymmetric.
    takes = iter([400, 20] + [900] * 100)
    now = [5_000]

    def perf_counter_ns() -> int:
        return now[0]

    def time_ns() -> int:
        took = next(takes)
        now[0] += took
        return ZERO + now[0] - (took // 2 if took == 20 else 0)

    monkeypatch.setattr(collector, "time", SimpleNamespace(perf_counter_ns=perf_counter_ns, time_ns=time_ns))
    assert zero_of_clock() == ZERO


class Seen:
    """An event of Kineto's, of which only these are asked."""

    def __init__(self, name: str, device: Any, stream: int, start: int, duration: int, correlation: int) -> None:
        self._given = name, device, stream, start, duration, correlation

    def name(self) -> str:
        return self._given[0]

    def device_type(self) -> Any:
        return self._given[1]

    def device_resource_id(self) -> int:
        return self._given[2]

    def start_ns(self) -> int:
        return self._given[3]

    def duration_ns(self) -> int:
        return self._given[4]

    def correlation_id(self) -> int:
        return self._given[5]


def test_kinetos_events_are_read_with_the_stream_of_what_ran() -> None:
    kinds = torch.profiler.DeviceType
    found = device_events(
        [Seen("cudaLaunchKernel", kinds.CPU, 4711, 100, 5, 1), Seen("gemm", kinds.CUDA, 7, 120, 30, 1)]
    )
    assert found == [DeviceEvent("cudaLaunchKernel", None, 100, 105, 1), DeviceEvent("gemm", 7, 120, 150, 1)]


def test_torch_still_has_what_is_read_of_its_events() -> None:
    """Of the CPU, as there is no GPU here: the same class, and the same profiler."""
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        torch.ones(4).sum()
    results: Any = profile.kineto_results
    found = device_events(results.events())
    assert found
    assert all(each.stream is None and each.end >= each.start > 1e18 for each in found)


def test_what_was_seen_travels_with_what_a_rank_tells_and_widens_its_step() -> None:
    schedule = lower(make_schedule("1f1b", 1, 1))
    recording = Recording(schedule)
    for instruction, start, end in HANDED_OVER:
        recording.note(0, instruction, start, end)
    told = recording.told_by(0, (100e-6, 400e-6), activities=[each._replace(rank=0) for each in collected()])
    assert told.window == pytest.approx((100e-6, 820e-6))
    assert RankTrace.unpacked(pickle.loads(pickle.dumps(told.packed()))) == told
    assert told.by_clock(2.0).activities[0].launched == pytest.approx(2.0 + 110e-6)
    recording.take(0, told)
    trace = recording.trace()
    assert trace.windows[0] == pytest.approx((0.0, 720e-6))
    assert trace.activities[0].start == pytest.approx(50e-6)
    (parts,) = parts_of_ranks(trace)
    assert sum(parts.values()) == pytest.approx(trace.makespan)
    # After the backward NCCL runs alone for 149 us, then a copy for 1, a kernel beside it for 100, the copy for 19.
    assert parts[Part.EXPOSED] == pytest.approx(149e-6)
    assert parts[Part.COPIES] == pytest.approx(20e-6)
    assert parts[Part.COMPUTE] == pytest.approx(500e-6)


def test_what_ran_before_the_step_is_no_part_of_it() -> None:
    recording = Recording(lower(make_schedule("1f1b", 1, 1)))
    recording.note(0, forward(0, 0), 300e-6, 310e-6)
    told = recording.told_by(0, (300e-6, 400e-6), activities=collected())
    assert [each.name for each in told.activities] == [each.name for each in collected()]
    assert told.activities[0].start == 300e-6
    later = recording.told_by(0, (360e-6, 400e-6), activities=collected())
    assert "gemm" not in [each.name for each in later.activities]


def test_a_launch_is_noted_with_its_ranks_and_its_purpose() -> None:
    recording = Recording(lower(make_schedule("1f1b", 1, 1)))
    recording.note_launch("0 1", None, "all_reduce")
    recording.note_launch("0 2", "a sum of gradients", "reduce_scatter")
    assert [each[1:] for each in recording.launches] == [
        ("all_reduce", "all_reduce of ranks 0 1", "0 1"),
        ("reduce_scatter", "a sum of gradients", "0 2"),
    ]
