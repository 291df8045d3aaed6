"""Programs on a GPU that is played late: its streams run behind the host, and a capture runs nothing."""

import threading

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.testing.rehearsal import Rehearsal
from tests.dataflow import kernels
from tests.dataflow.late import play_late


class HeldUp(threading.Condition):
    """A lock that threads come to only once they are let: after they have issued, before they have said so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_pass = threading.Event()

    def __enter__(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.may_pass.wait()
        return super().__enter__()


def add_one(source: Tensor, target: Tensor) -> None:
    target.copy_(source + 1)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_right_when_the_gpu_is_late(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = play_late(monkeypatch, seed)
    rehearsal = Rehearsal(seed, devices=["cuda:0", "cpu:0", "cpu:1"])
    rehearsal.run(150)
    rehearsal.close()
    assert all(gpu.num_captured)


def test_a_capture_is_whole_while_a_thread_has_not_yet_said_that_it_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of what a thread issued is there before the thread counts itself out."""
    gpu = play_late(monkeypatch, 0)
    with Machine(["cuda:0"]) as machine:
        compute = machine.place("cuda:0").compute
        assert isinstance(compute, CudaStream)
        x = machine.empty((4,), torch.int64)
        machine.submit(torch.zeros, 4, dtype=torch.int64, into=x, place="cuda:0")
        held_up, may_end = HeldUp(), threading.Event()
        monkeypatch.setattr(compute, "_issued", held_up)

        def body() -> None:
            machine.submit(add_one, x, x, reads=[x], writes=[x], place="cuda:0")

        def waits(target: Tensor) -> None:
            may_end.wait()
            target.zero_()

        machine.submit(waits, x, writes=[x], place="host")  # So the task is issued by a thread.
        threading.Timer(0.02, may_end.set).start()
        program = machine.record(body)
        held_up.may_pass.set()
        program.replay()
        assert (program.kind, gpu.num_captured) == ("graphs", [1])
        assert x.get().tolist() == [2] * 4


@pytest.mark.parametrize("seed", range(8))
def test_a_write_waits_for_copies_in_and_out_of_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies of x leave on one stream, but only that to the host is in a graph: x waits for the other as well."""
    play_late(monkeypatch, seed)
    with Machine(["cuda:0", "cpu:0"]) as machine:
        x, y, z, w = (machine.empty((4,), torch.int64) for _ in range(4))
        machine.submit(torch.zeros, 4, dtype=torch.int64, into=x, place="cuda:0")

        def body() -> None:
            machine.submit(add_one, x, y, reads=[x], writes=[y], place="cpu:0")
            machine.submit(add_one, x, w, reads=[x], writes=[w], place="cuda:0")
            machine.submit(add_one, x, z, reads=[x], writes=[z], place="host")
            machine.submit(add_one, x, x, reads=[x], writes=[x], place="cuda:0")

        program = machine.record(body)
        assert program.kind == "graphs"
        for count in range(1, 4):
            program.replay()
            assert [each.get()[0].item() for each in (x, y, z, w)] == [count + 1] * 4


def test_waiting_for_the_machine_is_waiting_for_the_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = play_late(monkeypatch, 0)
    with Machine(["cuda:0"]) as machine:
        x = machine.empty((4,), torch.int64)
        machine.submit(torch.zeros, 4, dtype=torch.int64, into=x, place="cuda:0")
        program = machine.record(lambda: machine.submit(add_one, x, x, reads=[x], writes=[x], place="cuda:0"))
        for _ in range(3):
            program.replay()
        assert gpu.num_relaunched == 2
        machine.wait()
        assert not gpu.default.queue


def test_a_tensor_that_is_changed_between_two_replays_is_refused_and_may_be_given_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = play_late(monkeypatch, 0)
    with Machine(["cuda:0"]) as machine:
        mine = torch.ones(4, dtype=torch.int64)
        x, y = machine.data(mine, name="x"), machine.empty((4,), torch.int64)
        program = machine.record(lambda: machine.submit(add_one, x, y, reads=[x], writes=[y], place="cuda:0"))
        for _ in range(3):
            program.replay()
        assert gpu.num_relaunched == 2
        mine.add_(5)
        with pytest.raises(ShardwiseError, match="x was changed behind the machine's back"):
            program.replay()
        x.set(mine)
        program.replay()
        assert y.get().tolist() == [7] * 4


def test_a_kernel_whose_data_are_there_is_launched_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = play_late(monkeypatch, 0)
    with Machine(["cuda:0"]) as machine:
        x, y = (machine.empty((10,)) for _ in range(2))
        machine.submit(torch.ones, 10, into=x, place="cuda:0")
        machine.submit(kernels.scale, x, y, 10, 2.0, BLOCK=16, grid=(1,), place="cuda:0")
        assert gpu.num_launched == 0  # Room for y had to be made.
        for _ in range(3):
            machine.submit(kernels.scale, y, x, 10, 3.0, BLOCK=16, grid=(1,), place="cuda:0")
            machine.prefetch(x, "host")  # It has to leave before the next one overwrites it.
            machine.submit(kernels.scale, x, y, 10, 1.0, BLOCK=16, grid=(1,), place="cuda:0")
        assert gpu.num_launched == 6
        assert (x.get().tolist(), y.get().tolist()) == ([54.0] * 10, [54.0] * 10)
