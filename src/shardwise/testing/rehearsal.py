"""Random programs, run on a machine and on plain tensors: no stale read, no lost write, no budget exceeded.

Tasks read and write integers, so that every difference is a bug. Sizes, budgets, places, policies, replays and
forgotten data are all drawn from one seed, which a failure reports.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.place import MakeStream
from shardwise.dataflow.streams import ThreadStream

_SIZES = (16, 16, 16, 24, 40)  # Elements of a value: mostly equal, as layers are, and some not.
_DEVICES = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
_NUM_DATA = 12
_MOST_OF_A_TASK = 4
_LEAST_BUDGET = _MOST_OF_A_TASK * max(_SIZES) * 8


class Rehearsal:
    """One machine with one random program, and its expected values."""

    def __init__(self, seed: int, *, devices: Sequence[str] = _DEVICES, make_stream: MakeStream = ThreadStream) -> None:
        self.seed = seed
        self._die = random.Random(seed)
        self._places = list(devices[: self._die.randint(1, len(devices))])
        budget: dict[str, int | str] = {
            place: _LEAST_BUDGET + self._die.randrange(8) * 128
            for place in (*self._places, "host")
            if self._die.random() < 0.8
        }
        self.machine = Machine(
            self._places,
            budget=budget,
            eviction=self._die.choice(["lru", "arc", "next-use"]),
            chunk_bytes=self._die.choice([64, 100, 2**20]),
            make_stream=make_stream,
        )
        self._values: list[Tensor] = []
        self._data: list[Data] = []
        for _ in range(_NUM_DATA):
            self._add_data()

    def run(self, num_operations: int) -> None:
        """Run this many random operations, then compare every value."""
        for _ in range(num_operations):
            self._one()
        for index in range(len(self._data)):
            self._compare(index)
        self.machine.wait()
        self._check_budgets()

    def close(self) -> None:
        """End the machine."""
        self.machine.close()

    def _one(self) -> None:
        choice = self._die.random()
        if choice < 0.72:
            self._task()
        elif choice < 0.80:
            self.machine.prefetch(self._die.choice(self._data), self._die.choice([*self._places, "host", "disk"]))
        elif choice < 0.88:
            self._compare(self._die.randrange(len(self._data)))
        elif choice < 0.93:
            index = self._die.randrange(len(self._data))
            self._values[index] = self._random_value(self._values[index].numel())
            self._data[index].set(self._values[index])
        elif choice < 0.98:
            index = self._die.randrange(len(self._data))
            del self._data[index], self._values[index]
            self._add_data()
        else:
            self._program()
        self._check_budgets()

    def _task(self) -> None:
        indices = self._die.sample(range(len(self._data)), self._die.randint(1, _MOST_OF_A_TASK))
        num_written = self._die.randint(0, min(2, len(indices)))
        factor = self._die.randint(1, 5)
        written, read = indices[:num_written], indices[num_written:]
        also_read = [index for index in written if self._die.random() < 0.5]
        place = self._die.choice([*self._places, "auto", "host"])
        reads, writes = ([self._data[index] for index in indices] for indices in ([*read, *also_read], written))
        self.machine.submit(_mix, reads, writes, factor, reads=reads, writes=writes, place=place)
        self._model([*read, *also_read], written, factor)

    def _program(self) -> None:
        """Record a few tasks, and replay them."""
        plan = [(self._die.sample(range(len(self._data)), 3), self._die.randint(1, 5)) for _ in range(3)]
        places = [self._die.choice([*self._places, "host"]) for _ in plan]

        def body() -> None:
            for ((one, other, target), factor), place in zip(plan, places, strict=True):
                reads, writes = [self._data[one], self._data[other]], [self._data[target]]
                self.machine.submit(_mix, reads, writes, factor, reads=reads, writes=writes, place=place)

        program = self.machine.record(body)
        num_replays = self._die.randint(0, 2)
        for _ in range(num_replays):
            program.replay()
        program.close()
        for _ in range(1 + num_replays):
            for (one, other, target), factor in plan:
                self._model([one, other], [target], factor)

    def _model(self, reads: Sequence[int], written: Sequence[int], factor: int) -> None:
        values = [self._values[index].clone() for index in written]
        _mix([self._values[index] for index in reads], values, factor)
        for index, value in zip(written, values, strict=True):
            self._values[index] = value

    def _compare(self, index: int) -> None:
        found, expected = self._data[index].get(), self._values[index]
        assert torch.equal(found, expected), f"seed {self.seed}: {self._data[index].name} is {found}, not {expected}"

    def _check_budgets(self) -> None:
        for place in self.machine.places:
            memory = place.memory
            if memory.budget_bytes is not None:
                assert memory.peak_bytes <= memory.budget_bytes, f"seed {self.seed}: {place} holds {memory.peak_bytes}"

    def _add_data(self) -> None:
        value = self._random_value(self._die.choice(_SIZES))
        self._values.append(value)
        self._data.append(self.machine.empty(value.shape, torch.int64))
        if self._die.random() < 0.5:
            self._data[-1] = self.machine.data(value.clone())
        else:
            self._data[-1].set(value)

    def _random_value(self, size: int) -> Tensor:
        return torch.tensor([self._die.randrange(1000) for _ in range(size)])


def _mix(reads: Sequence[Tensor], writes: Sequence[Tensor], factor: int) -> None:
    """Overwrite some values by a sum over others; values are read before they are written."""
    total = sum(each.sum() * (number + 1) for number, each in enumerate(reads)) * factor % 100_003
    for number, each in enumerate(writes):
        each.copy_(torch.arange(each.numel(), device=each.device) + total + number)
