"""What a GPU's time went into: every moment once, of the device and of each stream."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.trace.activities import Activity, ActivityKind, collective_of, kind_of, short_name
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.hidden import hidden_of_ranks
from shardwise.trace.perfetto import to_perfetto
from shardwise.trace.streams import State, device_spans, seconds_by_word, streams_of_ranks
from shardwise.trace.stretches import Part, parts_of_ranks, stretches
from tests.trace.devices import ALL_REDUCE, COMPUTE_STREAM, KERNEL, NCCL_STREAM, SUM, gpu_step


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "host to device"),
        ("Memcpy DtoH (Device -> Pageable)", "device to host"),
        ("Memcpy DtoD (Device -> Device)", "device to device"),
        ("Memcpy PtoP (Device -> Device)", "peer to peer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "NCCL"),
        ("Memset (Device)", "memory set"),
        ("void gemm<float>", "kernels"),
        ("void at::native::memcpy_like_kernel(float*)", "kernels"),
    ],
)
def test_what_a_gpu_does_is_told_apart_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "NCCL all reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "NCCL reduce scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL send recv"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "NCCL all gather"),
        ("nccl_something_new", "NCCL"),
    ],
)
def test_nccl_is_told_apart_by_collective(name: str, word: str) -> None:
    assert collective_of(name) == word


def test_a_kernels_name_is_short_and_a_copys_is_whole() -> None:
    assert short_name("void at::native::vectorized_elementwise_kernel<4, at::native::Add>(int)") == (
        "vectorized_elementwise_kernel"
    )
    assert short_name("Memcpy HtoD (Pageable -> Device)") == "Memcpy HtoD (Pageable -> Device)"
    assert short_name("sm90_xmma_gemm_bf16bf16") == "sm90_xmma_gemm_bf16bf16"


def _parts(**given: float) -> dict[Part, float]:
    trace = gpu_step(**given)  # type: ignore[arg-type]
    ranks = parts_of_ranks(trace)
    for parts in ranks:
        assert sum(parts.values()) == pytest.approx(trace.makespan)
    return ranks[0]


def test_a_step_is_cut_by_what_its_device_did() -> None:
    # Of 4 microbatches of 20 and 40 kernels of 1 ms, and 4 of the step.
    parts = _parts(kernel=1e-3, gap=2e-6)
    assert parts[Part.COMPUTE] == pytest.approx(0.240)
    assert parts[Part.OPTIMIZER] == pytest.approx(0.004)
    assert parts[Part.LAUNCH] == pytest.approx(244 * 2e-6)
    assert parts[Part.HOST] == pytest.approx(0.0)


def test_idle_time_is_the_hosts_where_nothing_was_launched() -> None:
    parts = _parts(kernel=1e-3, gap=0.0, idle=100e-6)
    # Launched 2 us before it runs: those are a gap, the rest is the host's.
    assert parts[Part.HOST] == pytest.approx(244 * 98e-6)
    assert parts[Part.LAUNCH] == pytest.approx(244 * 2e-6)


def test_a_sum_is_exposed_where_no_kernel_runs_beside_it() -> None:
    parts = _parts(exposed_sum=0.010, hidden_sum=0.005)
    assert parts[Part.EXPOSED] == pytest.approx(0.010)
    trace = gpu_step(exposed_sum=0.010, hidden_sum=0.005)
    on = {each.on for rank in stretches(trace) for each in rank if each.part is Part.EXPOSED}
    assert on == {SUM}
    # The gaps between kernels, a microsecond each, are not beside work.
    assert hidden_of_ranks(trace) == pytest.approx([0.005] * 2, abs=20e-6)


def test_what_goes_on_when_a_late_kernel_begins_was_not_waited_for() -> None:
    """The host is late before every kernel, while gradients are summed: without the sum it would be as late."""
    parts = _parts(kernel=1e-3, gap=0.0, idle=100e-6, hidden_sum=0.030, exposed_sum=0.010)
    assert parts[Part.EXPOSED] == pytest.approx(0.010)
    assert parts[Part.HOST] == pytest.approx(244 * 98e-6)


def test_a_kernel_that_was_ready_long_before_has_waited_for_what_moves() -> None:
    """A short kernel of another stream runs in the midst of a sum that the main stream waits for."""
    trace = gpu_step(num_ranks=1, exposed_sum=0.020)
    (total,) = [each for each in trace.activities if each.kind is ActivityKind.NCCL]
    middle = (total.start + total.end) / 2
    between = Activity(0, 31, ActivityKind.KERNEL, KERNEL, middle, middle + 1e-4, total.start - 1e-3)
    (parts,) = parts_of_ranks(replace(trace, activities=(*trace.activities, between)))
    assert parts[Part.EXPOSED] == pytest.approx(0.020 - 1e-4)


def test_a_collective_that_waits_for_a_rank_is_a_bubble_until_it_comes() -> None:
    trace = gpu_step(exposed_sum=0.010, late=0.007)
    first, last = parts_of_ranks(trace)
    assert first[Part.WAITING] == pytest.approx(0.007)
    assert first[Part.EXPOSED] == last[Part.EXPOSED] == pytest.approx(0.010)
    assert last[Part.WAITING] == 0


def test_copies_are_exposed_where_nothing_else_runs() -> None:
    parts = _parts(copy=0.002, hidden_copy=0.003)
    # The next one has begun when the kernel begins that waited for this one, a microsecond after it.
    assert parts[Part.COPIES] == pytest.approx(4 * 0.002, abs=4.1e-6)


def test_streams_add_up_to_the_step() -> None:
    trace = gpu_step(exposed_sum=0.010, hidden_sum=0.005, copy=0.001)
    for rank, uses in enumerate(streams_of_ranks(trace)):
        begin, end = trace.windows[rank]
        assert [use.role for use in uses] == ["compute", "NCCL", "copies"]
        for use in uses:
            assert sum(use.seconds.values()) + use.idle_seconds == pytest.approx(end - begin)
        assert uses[1].seconds == {"NCCL all reduce": pytest.approx(0.015)}
    assert seconds_by_word(trace.activities)["NCCL all reduce"] == pytest.approx(2 * 0.015)


def _random_trace(seed: int) -> Trace:
    """Whatever runs on whatever stream, in a step of a second, over instructions that know nothing of it."""
    rng = random.Random(seed)
    names = (KERNEL, ALL_REDUCE, "Memcpy DtoH (Device -> Pinned)", "Memset (Device)")
    activities = []
    for rank in range(2):
        for stream in range(rng.randint(1, 4)):
            now = 0.0
            while now < 0.95:
                start = now + rng.choice((0.0, 0.001, 0.03))
                now = min(start + rng.uniform(0, 0.05), 1.0)
                name = rng.choice(names)
                launched = rng.choice((None, start, start - 0.02))
                purpose = SUM if name is ALL_REDUCE and rng.random() < 0.5 else ""
                group = "0 1" if purpose else ""
                activities.append(Activity(rank, stream, kind_of(name), name, start, now, launched, "", purpose, group))
    events = [Event("0F0", rank, Lane.COMPUTE, 0.1, 0.6, 0, 0) for rank in range(2)]
    events += [Event("x", rank, Lane.WAIT, 0.6, 0.7, -1, 0) for rank in range(2)]
    events += [Event("0STEP0", rank, Lane.STEP, 0.7, 0.9, 0, 0) for rank in range(2)]
    return Trace(
        name="1f1b",
        num_ranks=2,
        events=tuple(events),
        windows=((0.0, 1.0),) * 2,
        activities=tuple(activities),
    )


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_device_did_its_parts_add_up_and_no_moment_is_left_out(seed: int) -> None:
    trace = _random_trace(seed)
    for rank, found in enumerate(stretches(trace)):
        assert found[0].start == 0.0
        assert found[-1].end == pytest.approx(1.0)
        assert all(one.end == other.start for one, other in pairwise(found))
        computing = [each for each in trace.activities_of_ranks[rank] if each.kind is ActivityKind.KERNEL]
        for each in random.Random(seed).sample(computing, min(5, len(computing))):
            middle = (each.start + each.end) / 2
            state = next(span.state for span in device_spans(trace)[rank] if span.start <= middle < span.end)
            assert state is State.COMPUTE
    for parts in parts_of_ranks(trace):
        assert sum(parts.values()) == pytest.approx(1.0)
    for uses in streams_of_ranks(trace):
        for use in uses:
            assert sum(use.seconds.values()) + use.idle_seconds == pytest.approx(1.0)


def test_a_trace_without_activities_is_cut_as_before() -> None:
    trace = gpu_step()
    plain = Trace(name=trace.name, num_ranks=2, events=trace.events, windows=trace.windows)
    assert parts_of_ranks(plain)[0][Part.COMPUTE] == pytest.approx(trace.busy[0])
    assert parts_of_ranks(plain)[0][Part.LAUNCH] == 0
    assert streams_of_ranks(plain) == ((), ())
    assert device_spans(plain) == ((), ())


def test_perfetto_has_a_thread_for_each_stream() -> None:
    trace = gpu_step(exposed_sum=0.010)
    entries = to_perfetto(trace)["traceEvents"]
    assert isinstance(entries, list)
    threads = {(each["pid"], each["args"]["name"]): each["tid"] for each in entries if each["name"] == "thread_name"}
    compute, nccl = f"stream {COMPUTE_STREAM} (compute)", f"stream {NCCL_STREAM} (NCCL)"
    assert {(rank, name) for rank in range(2) for name in (compute, nccl)} <= set(threads)
    (found,) = [each for each in entries if each["ph"] == "X" and each["tid"] == threads[1, nccl] and each["pid"] == 1]
    assert found["name"] == SUM
    assert found["dur"] == pytest.approx(0.010 * 1e6)
    assert found["args"]["instruction"] == "0STEP0"
