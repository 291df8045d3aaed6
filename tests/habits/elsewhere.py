"""State that forwards keep where nobody looks: caches of functions, defaults, slots, arrays, tensors of a file."""
# Programs as users write them.
# mypy: disable-error-code="attr-defined,no-any-return,index"

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.habits.harness import Block, Net, Parallelize, Result, program, small_net, start, trained

PARTS = "a part of a sequence gives other numbers"
#: One count of all blocks, which are on several stages.
COUNTED = {"pp": "stages compute something else", "cp": PARTS}
#: Another number in the second forward.
AGAIN = {"recompute": "recompute=full runs each twice"}
#: Numbers of rows that the next forward reads.
FOLLOWED = AGAIN | dict.fromkeys(("dp", "cp", "sp"), f"depends on its rows and changes the next one|its loss|{PARTS}")


@cache
def projection(width: int) -> Tensor:
    return torch.randn(width, width, dtype=torch.float64) / width**0.5


class Projects(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ projection(x.shape[-1]))


@program(but="cp")
def a_projection_drawn_once(parallelize: Parallelize) -> Result:
    """`@cache` of a random matrix: trials draw nothing, and it is not theirs that is trained with."""
    projection.cache_clear()
    return trained(start(parallelize, small_net(block=Projects)))


@cache
def causal(length: int) -> Tensor:
    return torch.ones(length, length).tril().bool()


class Masks(Block):
    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.transpose(-1, -2)).masked_fill(~causal(x.shape[1]), -1e9)
        return super().forward(scores.softmax(-1) @ x)


@program(but="cp")
def a_mask_cached_by_length(parallelize: Parallelize) -> Result:
    """`@cache` of a mask that all blocks read: ranks on which it was made earlier cut the module alike."""
    causal.cache_clear()
    return trained(start(parallelize, small_net(block=Masks)))


class Counting(Block):
    def forward(self, x: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006 - people do
        calls[0] += self.training
        return super().forward(x) * (1 + 0.1 * calls[0])


@program(COUNTED)
def calls_counted_in_a_default(parallelize: Parallelize) -> Result:
    """`def forward(self, x, calls=[0])`."""
    Counting.forward.__defaults__[0][0] = 0
    return trained(start(parallelize, small_net(block=Counting)))


def shrunk(x: Tensor) -> Tensor:
    shrunk.calls += 1
    return x / (1 + 0.1 * shrunk.calls)


class Shrinks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return shrunk(super().forward(x))


@program({"cp": PARTS})
def calls_counted_on_a_function(parallelize: Parallelize) -> Result:
    """`shrunk.calls += 1`."""
    shrunk.calls = 0
    return trained(start(parallelize, Shrinks().double()))


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Slotted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Slots()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.calls += self.training
        return super().forward(x) * (1 + 0.1 * self.kept.calls)


@program(AGAIN)
def calls_counted_in_slots(parallelize: Parallelize) -> Result:
    """An object with `__slots__`."""
    return trained(start(parallelize, small_net(block=Slotted)))


class Follows(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x) / float(self.mean[0])
        if self.training:
            self.mean *= 0.9
            self.mean += 0.1 * float(x.detach().abs().mean())
        return made


@program(FOLLOWED)
def a_mean_kept_in_an_array(parallelize: Parallelize) -> Result:
    """`self.mean *= 0.9` of a NumPy array, which the next forward reads."""
    return trained(start(parallelize, small_net(block=Follows)))


CALLS = torch.zeros(1, dtype=torch.float64)


class Counted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * self.count())

    def count(self) -> Tensor:
        CALLS.add_(self.training)
        return CALLS.clone()


@program({"cp": PARTS, **AGAIN})
def calls_counted_in_a_tensor_of_the_file(parallelize: Parallelize) -> Result:
    """`CALLS.add_(1)`, in a method that the forward calls."""
    CALLS.zero_()
    return trained(start(parallelize, small_net(block=Counted)))


LOCAL: Any = threading.local()


class Local(Block):
    def forward(self, x: Tensor) -> Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + self.training
        return super().forward(x) * (1 + 0.1 * LOCAL.calls)


@program(COUNTED)
def calls_counted_by_the_thread(parallelize: Parallelize) -> Result:
    """`threading.local()`."""
    vars(LOCAL).clear()
    return trained(start(parallelize, small_net(block=Local)))


class Table(Block):
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
        return super().forward(x * self.table[: x.shape[1]])


@program(but="cp")
def a_table_registered_as_none(parallelize: Parallelize) -> Result:
    """`register_buffer("table", None)`, filled by the first forward."""
    return trained(start(parallelize, small_net(block=Table)))


class Odd(Net):
    """A gain of its scores, and a matrix without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.none.sum()


@program()
def a_matrix_without_numbers(parallelize: Parallelize) -> Result:
    """The trial of tp failed on it, so that a gain of cut scores was different on each rank."""
    return trained(start(parallelize, Odd().double()))
