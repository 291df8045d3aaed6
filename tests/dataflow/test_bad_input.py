"""Every mistake is a sentence with a remedy, and the user's tensors stay as they are."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.task_errors import TaskError
from shardwise.errors import ShardwiseError
from tests.dataflow.machines import Shuffle

TWO = ["cpu:0", "cpu:1"]


def touch(*tensors: Tensor) -> None:
    """A task that does nothing."""


def fail(x: Tensor) -> None:  # noqa: ARG001
    raise ValueError("the ninth row is empty")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Machine([]), 'a machine needs a device; none was given\n  try: Machine(["cpu:0"])'),
        (
            lambda: Machine(["gpu0"]),
            "'gpu0' is not a device; devices are called cuda:N or cpu:N\n  try: cuda:0, or cpu:0",
        ),
        (
            lambda: Machine(["host"]),
            "'host' is not a device; devices are called cuda:N or cpu:N\n  try: host and disk are there by themselves",
        ),
        (lambda: Machine(["cpu:0", "cpu:0"]), "cpu:0 was given 2 times\n  try: each device once"),
        (lambda: Machine(TWO, budget={"cpu:2": 1}), "unknown place 'cpu:2'; known: cpu:0, cpu:1, host, disk\n  try: "),
        (
            lambda: Machine(TWO, budget={"cpu:0": 0}),
            "a budget of 0 bytes for cpu:0 holds nothing\n  try: at least 1 MiB",
        ),
        (lambda: Machine(TWO, eviction="lur"), "unknown eviction 'lur'; known: lru, arc, next-use\n  try: lru"),
        (lambda: Machine(TWO, disk="nowhere"), "there is no folder nowhere to spill to\n  try: mkdir -p nowhere"),
        (lambda: Link(bytes_per_second=0.0), "a link of 0.0 s and 0.0 bytes/s is none\n  try: Link("),
        (
            lambda: Machine(TWO, links={("cpu:0", "cpu:3"): Link(bytes_per_second=1.0)}),
            "a link leads to cpu:3, which is not a place\n  try: cpu:0, cpu:1, disk, host",
        ),
        (
            lambda: Machine(["cpu:0"], links={("cpu:0", "host"): Link(bytes_per_second=1.0)}),
            "no link between host and disk was given, but others were\n  try: links=",
        ),
    ],
)
def test_a_machine_that_cannot_be_made_says_why(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        make()
    assert str(caught.value).startswith(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_does_not_exist_is_told() -> None:
    with pytest.raises(ShardwiseError, match="cuda:1 does not exist: this machine has 0 GPUs"):
        Machine(["cuda:1"])


@pytest.mark.parametrize(
    ("submit", "text"),
    [
        (
            lambda machine, x: machine.submit(touch, x),
            "what touch reads and writes is not known: only a Triton kernel's source says it\n"
            "  try: reads=[x, ...], writes=[...], or into= for what it returns",
        ),
        (
            lambda machine, x: machine.submit(touch, x, machine.empty((2,), name="y"), reads=[x]),
            "y is an argument of touch but is declared neither as read nor as written\n  try: reads=[y] or writes=[y]",
        ),
        (
            lambda machine, x: machine.submit(touch, x, reads=[x], place="cpu:7"),
            "unknown place 'cpu:7'; known: cpu:0, cpu:1, host, disk\n  try: ",
        ),
        (
            lambda machine, x: machine.submit(touch, machine.empty((2,), name="y"), into=x, place="cpu:0"),
            "y is read but has no value yet: no task has written it\n  try: y.set(tensor), or a task with writes=[y]",
        ),
        (
            lambda machine, x: x.set(torch.ones(3)),  # noqa: ARG005
            "x is [2] of torch.float32, but the new value is [3] of torch.float32\n  try: machine.data(tensor), ",
        ),
        (
            lambda machine, x: machine.data(torch.ones(2, 1).expand(2, 3), name="y"),  # noqa: ARG005
            "y has gaps, or the same memory twice: shape [2, 3] with strides [1, 0]\n"
            "  try: machine.data(tensor.contiguous())",
        ),
        (
            lambda machine, x: machine.copy(torch.ones(2), torch.ones(3)),  # noqa: ARG005
            "[3] of torch.float32 cannot be copied into [2] of torch.float32\n"
            "  try: two tensors of the same shape and dtype",
        ),
        (
            lambda machine, x: machine.report(),  # noqa: ARG005
            "nothing was recorded that a report could show\n  try: Machine(..., trace=True)",
        ),
        (
            lambda machine, x: machine.record(lambda: None),  # noqa: ARG005
            "the recorded function submitted no task\n  try: machine.submit(...) inside of it",
        ),
        (
            lambda machine, x: machine.record(x.get),
            "x.get() is asked for inside of a program that is being recorded\n  try: get() after the program has run",
        ),
    ],
)
def test_a_mistake_is_told_when_it_is_made(submit: Callable[[Machine, Any], None], text: str) -> None:
    given = torch.ones(2)
    with Machine(TWO) as machine:
        with pytest.raises(ShardwiseError) as caught:
            submit(machine, machine.data(given, name="x"))
        assert str(caught.value).startswith(text)
        assert machine.data(given).get().tolist() == [1.0, 1.0]


def test_an_error_names_the_task_its_kernel_its_place_and_its_line() -> None:
    given = torch.ones(2)
    machine = Machine(TWO)
    x = machine.data(given, name="x")
    machine.submit(fail, x, reads=[x], writes=[x], place="cpu:1", name="row 9")
    file = fail.__code__.co_filename
    with pytest.raises(TaskError) as caught:
        x.get()
    expected = "task row 9 (fail) failed at cpu:1: ValueError: the ninth row is empty; it was submitted in "
    assert str(caught.value).startswith(f"{expected}{file}, line ")
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TaskError):
        machine.submit(touch, x, reads=[x])
    machine.close()
    assert given.tolist() == [1.0, 1.0]


def test_nothing_runs_behind_a_task_that_failed() -> None:
    ran: list[int] = []
    machine = Machine(TWO, make_stream=Shuffle(0).make())
    x = machine.data(torch.ones(2))
    machine.submit(fail, x, reads=[x], writes=[x], place="cpu:0")
    machine.submit(lambda _: ran.append(1), x, reads=[x], place="cpu:1")
    with pytest.raises(TaskError):
        machine.wait()
    machine.close()
    assert ran == []


def test_a_result_of_another_shape_is_told() -> None:
    machine = Machine(TWO)
    y = machine.empty((3,), name="y")
    machine.submit(torch.ones, 2, into=y, place="cpu:0")
    with pytest.raises(TaskError, match=r"it returned \[2\] of torch.float32, but into= is \[3\] of torch.float32"):
        y.get()
    machine.close()


def test_no_room_anywhere_says_what_is_needed_and_what_there_is() -> None:
    given = torch.ones(1000)
    with Machine(TWO, budget={"cpu:0": 2000}) as machine:
        x = machine.data(given, name="x")
        with pytest.raises(ShardwiseError) as caught:
            machine.submit(touch, x, reads=[x], place="cpu:0")
        assert str(caught.value).startswith(
            "no room for x: 3.9 KiB are needed at cpu:0; cpu:0 has 0 B in use of 2.0 KiB, cpu:1 has 0 B in use,"
            " host has 0 B in use, disk has 0 B in use\n"
            '  try: a larger budget, as in Machine(budget={"cpu:0": "5.9 KiB"}), or tasks that use less at once'
        )
        machine.submit(torch.neg, x, into=machine.empty((1000,)), place="cpu:1")
    assert given.sum() == 1000


def test_a_tensor_changed_behind_the_machines_back_is_told() -> None:
    given = torch.ones(2)
    with Machine(TWO) as machine:
        x = machine.data(given, name="x")
        given.add_(1)
        with pytest.raises(ShardwiseError, match="x was changed behind the machine's back") as caught:
            machine.submit(touch, x, reads=[x], place="cpu:0")
        assert caught.value.remedy == "x.set(tensor), which the machine sees"
        x.set(given)
        machine.submit(torch.neg, x, into=x, place="cpu:0")
        assert x.get().tolist() == [-2.0, -2.0]


def test_what_the_machine_itself_writes_is_no_change_behind_its_back() -> None:
    given = torch.ones(2)
    with Machine(TWO) as machine:
        x = machine.data(given)
        for place in ("cpu:0", "host", "cpu:1"):
            machine.submit(torch.neg, x, into=x, place=place)
            x.get()
    assert given.tolist() == [-1.0, -1.0]


def test_a_write_to_memory_that_other_data_share_is_refused() -> None:
    given = torch.ones(4)
    with Machine(TWO) as machine:
        whole, part = machine.data(given, name="whole"), machine.data(given[1:3], name="part")
        machine.submit(touch, whole, part, reads=[whole, part])
        with pytest.raises(ShardwiseError) as caught:
            machine.submit(touch, part, writes=[part])
        assert str(caught.value) == (
            "touch writes part, which shares its memory with whole\n  try: machine.data(tensor.clone())"
        )
        apart = machine.data(given.clone()[:2], name="apart")
        machine.submit(touch, apart, writes=[apart])


def test_a_closed_machine_says_so() -> None:
    with Machine(TWO) as machine:
        x = machine.data(torch.ones(2))
    machine.close()
    for use in (x.get, lambda: machine.submit(touch, x, reads=[x]), lambda: machine.prefetch(x, "cpu:0")):
        with pytest.raises(ShardwiseError, match="the machine is closed"):
            use()


def test_data_of_another_machine_are_refused() -> None:
    with Machine(TWO) as one, Machine(TWO) as other:
        x = one.data(torch.ones(2), name="x")
        with pytest.raises(ShardwiseError, match="x belongs to another machine"):
            other.submit(touch, x, reads=[x])


def test_a_disk_that_fills_is_a_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    given = torch.ones(10)
    with Machine(["cpu:0"], budget={"cpu:0": 80, "host": 80}, disk=tmp_path) as machine:
        values = [machine.empty((10,), name=f"y{number}") for number in range(5)]
        x = machine.data(given)
        for number, value in enumerate(values[:4]):
            machine.submit(torch.full, (10,), float(number), into=value, place="cpu:0")
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(ShardwiseError) as caught:
                machine.submit(torch.neg, x, into=values[4], place="cpu:0")
        assert str(caught.value) == (
            f"the disk has no room for 40 B in {tmp_path}: No space left on device\n"
            "  try: Machine(disk=FOLDER) on a larger disk, or a budget for the disk"
        )
        machine.submit(torch.neg, x, into=values[4], place="cpu:0")
        assert [value.get()[0].item() for value in values] == [0, 1, 2, 3, -1]
    assert given.tolist() == [1.0] * 10
    assert list(tmp_path.iterdir()) == []


def test_a_check_finds_a_task_that_reads_what_it_does_not_say() -> None:
    """The sum sees the host's y, though only x is said to be read: with y at another place it sees an older one."""
    with Machine(TWO) as machine:
        x, y, z = machine.data(torch.ones(2)), machine.data(torch.ones(2)), machine.empty((2,), name="z")
        hidden = y.copies[machine.host.index]
        assert hidden is not None

        def flow() -> None:
            machine.submit(torch.neg, y, into=y, place="cpu:0")
            machine.submit(lambda value: value + hidden.tensor, x, reads=[x], into=z, place="cpu:1")
            machine.wait()

        with pytest.raises(ShardwiseError) as caught:
            machine.check(flow)
        assert str(caught.value).startswith("z is not what its tasks give one by one on cpu:0: 2 of 2 numbers differ")
