"""Stock Triton kernels as tasks, run by Triton's interpreter: transfers and waits follow from their source alone."""

import random

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from tests.dataflow import kernels
from tests.dataflow.machines import Shuffle

TWO = ["cpu:0", "cpu:1"]


def flow(machine: Machine, places: list[str]) -> Tensor:
    """y = 2 x, z = 3 y, z += x, and all but the last of z from x."""
    x, y, z = machine.data(torch.arange(10.0), name="x"), machine.empty((10,)), machine.empty((10,))
    machine.submit(kernels.scale, x, y, 10, 2.0, BLOCK=16, grid=(1,), place=places[0])
    machine.submit(kernels.scale, y, z, 10, 3.0, BLOCK=16, grid=(1,), place=places[1])
    machine.submit(kernels.accumulate, z, x, 10, BLOCK=16, grid=(1,), place=places[0])
    machine.submit(kernels.shift_through_another, x, z, 10, BLOCK=16, grid=(1,), place=places[1])
    return z.get()


def test_kernels_over_two_places_give_what_they_give_on_one() -> None:
    expected = [*range(1, 10), 9 * 7]
    for places in (["cpu:0", "cpu:0"], TWO):
        with Machine(TWO) as machine:
            assert flow(machine, places).tolist() == expected
    for seed in range(5):
        with Machine(TWO, make_stream=Shuffle(seed).make()) as machine:
            assert flow(machine, TWO).tolist() == expected


def test_a_kernels_transfers_follow_from_its_source() -> None:
    """Each arrow is 40 bytes: x and z to cpu:0, y, x and z to cpu:1. A new output is not brought from anywhere."""
    with Machine(TWO) as machine:
        flow(machine, TWO)
        host = machine.host.index
        assert machine.mover.moved_bytes == {(host, 0): 40, (0, 1): 120, (1, 0): 40, (1, host): 40}


def test_arguments_may_be_given_by_name() -> None:
    with Machine(TWO) as machine:
        x, y = machine.data(torch.ones(10)), machine.empty((10,))
        machine.submit(kernels.scale, x, y_ptr=y, n=10, factor=4.0, BLOCK=16, grid=(1,), place="cpu:1")
        assert y.get().tolist() == [4.0] * 10


def test_given_accesses_win_over_those_in_the_source() -> None:
    with Machine(TWO) as machine:
        x, y = machine.data(torch.ones(10)), machine.data(torch.ones(10))
        machine.submit(
            kernels.scale, x, y, 10, 4.0, BLOCK=16, grid=(1,), place="cpu:1", reads=[x], writes=[y]
        )  # fmt: skip
        assert machine.mover.num_transfers == 1
        assert y.get().tolist() == [4.0] * 10


def test_a_kernel_is_recorded_and_replayed() -> None:
    with Machine(TWO) as machine:
        x, total = machine.data(torch.ones(10)), machine.data(torch.zeros(10))
        program = machine.record(
            lambda: machine.submit(kernels.accumulate, total, x, 10, BLOCK=16, grid=(1,), place="cpu:1")
        )
        program.replay()
        assert total.get().tolist() == [2.0] * 10


def test_a_kernel_whose_accesses_cannot_be_found_needs_them_given() -> None:
    with Machine(TWO) as machine:
        table, y = machine.data(torch.zeros(1, dtype=torch.int64), name="table"), machine.empty((1,))
        with pytest.raises(ShardwiseError) as caught:
            machine.submit(kernels.made_of_numbers, table, y, grid=(1,), place="cpu:0")
        assert str(caught.value) == (
            "what made_of_numbers reads and writes is not known: it makes pointers out of numbers, which mean nothing"
            " at another place\n  try: reads=[table, ...], writes=[...], or into= for what it returns"
        )


def test_a_kernel_without_a_grid_is_told() -> None:
    text = "scale is a Triton kernel and was given no grid"
    with Machine(TWO) as machine, pytest.raises(ShardwiseError, match=text):
        machine.submit(kernels.scale, machine.data(torch.ones(10)), machine.empty((10,)), 10, 1.0, BLOCK=16)


def test_a_kernel_given_a_plain_tensor_is_told_of_data() -> None:
    text = r"scale is given a tensor of \[10\] that the machine does not know"
    with Machine(TWO) as machine, pytest.raises(ShardwiseError, match=text):
        machine.submit(kernels.scale, torch.ones(10), machine.empty((10,)), 10, 1.0, BLOCK=16, grid=(1,))


@pytest.mark.parametrize("seed", range(4))
def test_random_kernels_are_right_in_whatever_order_their_streams_run(seed: int) -> None:
    """Most of these find all their data in place and take the quick way; some do not."""
    die = random.Random(seed)
    with Machine(TWO, make_stream=Shuffle(seed).make()) as machine:
        values = [torch.randint(0, 9, (10,)).float() for _ in range(4)]
        data = [machine.data(value.clone()) for value in values]
        for _ in range(40):
            one, other = die.sample(range(4), 2)
            place = die.choice([*TWO, "cpu:0", "cpu:0"])
            if die.random() < 0.5:
                machine.prefetch(data[one], place)
                machine.prefetch(data[other], place)
            if die.random() < 0.5:
                machine.submit(kernels.scale, data[one], data[other], 10, 2.0, BLOCK=16, grid=(1,), place=place)
                values[other] = values[one] * 2 % 1024
                machine.submit(wrap, data[other], reads=[data[other]], writes=[data[other]], place=place)
            else:
                machine.submit(kernels.accumulate, data[one], data[other], 10, BLOCK=16, grid=(1,), place=place)
                values[one] = values[one] + values[other]
        for found, value in zip(data, values, strict=True):
            assert torch.equal(found.get(), value)


def wrap(x: Tensor) -> None:
    x %= 1024
