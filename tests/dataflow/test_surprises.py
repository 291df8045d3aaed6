"""What happens to tasks between being submitted and being run, and arguments that hold data inside of others."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.launch import Call
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.task_errors import TaskError
from shardwise.errors import ShardwiseError
from tests.apart import run_script
from tests.dataflow import kernels
from tests.dataflow.machines import Shuffle

TWO = ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("place", ["cpu:0", "host"])
def test_a_tensor_that_is_changed_while_a_task_is_queued_is_told_and_not_read(place: str) -> None:
    """Streams of a shuffle run only when somebody waits: all is still to be done when the tensor is changed."""
    given = torch.ones(4)
    with Machine(TWO, make_stream=Shuffle(0).make()) as machine:
        x, y = machine.data(given, name="x"), machine.empty((4,))
        machine.submit(torch.neg, x, into=y, place=place)
        given.add_(5)
        with pytest.raises(TaskError, match="x was changed behind the machine's back"):
            y.get()
    assert given.tolist() == [6.0] * 4


def test_a_change_through_a_view_is_a_change() -> None:
    given = torch.zeros(4)
    view = given[1:]
    with Machine(TWO) as machine:
        x, y = machine.data(given, name="x"), machine.empty((4,))
        machine.submit(torch.neg, x, into=y, place="cpu:0")
        machine.wait()
        view.add_(1)
        with pytest.raises(ShardwiseError, match="x was changed behind the machine's back"):
            machine.submit(torch.neg, x, into=y, place="cpu:1")


class Pair(NamedTuple):
    one: object
    other: object


def total(*, parts: dict[str, Tensor], more: list[Tensor], pair: Pair) -> Tensor:
    assert isinstance(pair.one, Tensor)
    assert isinstance(pair.other, Tensor)
    return sum([*parts.values(), *more, pair.one, pair.other], torch.zeros(3))


def test_data_inside_of_lists_dictionaries_and_named_tuples_are_found() -> None:
    with Machine(TWO) as machine:
        values = [machine.empty((3,)) for _ in range(5)]
        for number, each in enumerate(values):
            machine.submit(torch.full, (3,), float(10**number), into=each, place=TWO[number % 2])
        made = machine.empty((3,))
        first, second, third, fourth, fifth = values
        parts = {"a": first, "b": second}
        machine.submit(total, parts=parts, more=[third], pair=Pair(fourth, fifth), into=made, place="cpu:0")
        machine.submit(torch.cat, [made, made], into=machine.empty((6,)), place="cpu:1")
        assert made.get().tolist() == [11111.0] * 3
        assert set(made.places) >= {"cpu:0", "cpu:1"}


def test_a_kernel_finds_data_in_a_tuple() -> None:
    with Machine(TWO) as machine:
        x, y = machine.data(torch.ones(4), name="x"), machine.empty((4,), name="y")
        calls: list[Call] = []
        machine.calls = calls
        machine.submit(kernels.through_a_tuple, (x, y), 4, grid=(1,), place="cpu:1")
        machine.calls = None
        assert (calls[0].reads, calls[0].writes) == ([x], [x, y])  # Of a tuple all is taken to be both.
        assert y.get().tolist() == [1.0] * 4
        with pytest.raises(ShardwiseError, match=r"is given a tensor of \[4\] that the machine does not know"):
            machine.submit(kernels.through_a_tuple, (x, torch.ones(4)), 4, grid=(1,), place="cpu:1")


def test_a_disk_that_really_fills_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """No file of the process may grow over 500 bytes, and a value has a thousand."""
    program = """
import resource, signal, sys, torch
from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
given = torch.arange(250.0)
with Machine(["cpu:0"], budget={"cpu:0": 2000, "host": 1000}, disk=sys.argv[1]) as machine:
    x, values = machine.data(given), [machine.empty((250,)) for _ in range(6)]
    made = []
    try:
        for number, value in enumerate(values):
            machine.submit(torch.full, (250,), float(number), into=value, place="cpu:0")
            made.append(number)
    except ShardwiseError as error:
        print(error)
    print(made, values[0].get()[0].item(), x.get()[3].item())
    values[0] = None  # It was on the host: there is room again.
    machine.submit(torch.add, values[1], values[2], into=values[1], place="cpu:0")
    print(values[1].get()[0].item())
"""
    script, disk = tmp_path / "full.py", tmp_path / "disk"
    script.write_text(program, encoding="utf-8")
    disk.mkdir()
    ran = run_script(script, str(disk), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    sentence, remedy, values, total = ran.stdout.splitlines()
    assert sentence == f"the disk has no room for 1000 B in {disk}: File too large"
    assert remedy.startswith("  try: Machine(disk=FOLDER) on a larger disk")
    assert (values, total) == ("[0, 1, 2] 0.0 3.0", "3.0")
    assert list(disk.iterdir()) == []
