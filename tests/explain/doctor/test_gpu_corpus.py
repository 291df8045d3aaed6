"""The doctor finds the seeded faults of runs on GPUs, and says nothing of runs that have none."""

import re

import pytest

from shardwise.explain.doctor.examine import examine
from tests.explain.doctor.gpu_corpus import GPU_FAULTS, GPU_HEALTHY, on_gpus
from tests.trace.devices import PAGEABLE, gpu_step


@pytest.mark.parametrize("name", GPU_FAULTS)
def test_a_fault_of_a_gpu_is_found_with_its_numbers_and_something_to_type(name: str) -> None:
    kind, make = GPU_FAULTS[name]
    run = make()
    found = examine(run)
    assert [finding.kind for finding in found] == [kind]
    (finding,) = found
    assert re.search(r"\d", finding.evidence)
    assert finding.fix
    assert finding.gain_seconds is not None
    assert 0.03 * run.trace.makespan <= finding.gain_seconds < run.trace.makespan


@pytest.mark.parametrize("name", GPU_HEALTHY)
def test_nothing_is_said_of_a_healthy_gpu(name: str) -> None:
    assert examine(GPU_HEALTHY[name]()) == []


def test_what_is_told_of_a_host_that_stalls_is_where() -> None:
    (finding,) = examine(on_gpus(gpu_step(stall=0.006)))
    assert "the longest gap is 6 ms" in finding.evidence or "the longest gap is 5.998 ms" in finding.evidence
    assert re.search(r"before gemm_kernel of 0F\d", finding.evidence)
    assert finding.fix == "microbatches=2"


def test_the_gain_of_pinned_copies_is_what_was_exposed() -> None:
    (finding,) = examine(on_gpus(gpu_step(copy=0.005, copy_name=PAGEABLE)))
    assert finding.gain_seconds == pytest.approx(4 * 0.005)
    assert "pin_memory" in finding.fix


def test_the_gain_of_a_late_stream_is_how_long_it_ran_alone() -> None:
    (finding,) = examine(on_gpus(gpu_step(num_ranks=1, side=0.004), "dp=1"))
    assert finding.gain_seconds == pytest.approx(4 * 0.004, rel=0.01)
    assert "stream 7 of rank 0 waits for stream 31" in finding.problem


def test_the_same_two_streams_of_many_ranks_are_one_finding() -> None:
    (finding,) = [each for each in examine(on_gpus(gpu_step(num_ranks=8, side=0.004))) if each.kind == "late stream"]
    assert finding.ranks == tuple(range(8))
    assert finding.problem.startswith("stream 7 of 8 ranks, most of all rank ")
