"""What runs on an example leave in generators, classes and files is put back; an iterator cannot be."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.python_state import PythonState

CALLS = 0


class Noted(nn.Module):
    calls = 0

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        type(self).calls += 1
        return x


@pytest.mark.parametrize(
    ("held", "draw"),
    [
        (torch.Generator().manual_seed(1), lambda each: float(torch.rand((), generator=each))),
        (random.Random(1), lambda each: each.random()),
        (np.random.default_rng(1), lambda each: each.random()),
        (np.random.RandomState(1), lambda each: each.random_sample()),
    ],
    ids=["torch", "python", "numpy", "older numpy"],
)
def test_a_generator_of_ones_own_goes_on_where_it_was(held: Any, draw: Callable[[Any], float]) -> None:
    state = PythonState(Noted(held))
    first = draw(held)
    assert state.changed() == {"held": "was drawn from"}
    state.restore()
    assert state.changed() == {}
    assert draw(held) == first


@pytest.mark.parametrize("num_before", [0, 1], ids=["none waits", "one of two normal numbers waits"])
def test_the_generator_of_numpy_goes_on_where_it_was(num_before: int) -> None:
    np.random.seed(1)
    np.random.randn(num_before)
    state = PythonState()
    assert not state.have_drawn()
    drawn = np.random.randn(3)
    assert state.have_drawn()
    state.restore()
    assert not state.have_drawn()
    first = np.random.randn()  # The one that waits, if one does: then nothing is made for it.
    assert first == drawn[0]
    state.restore()
    assert np.array_equal(np.random.randn(3), drawn)


def test_numbers_of_a_class_and_of_a_file_are_put_back() -> None:
    module = Noted()
    state, before = PythonState(module), CALLS
    module(torch.ones(1))
    assert {"Noted.calls", "CALLS"} <= set(state.changed())
    state.restore()
    assert (Noted.calls, CALLS) == (0, before)


def doubled() -> Iterator[int]:
    for each in range(9):
        yield 2 * each


@pytest.mark.parametrize(
    "held", [itertools.count(), itertools.cycle([1, 2]), iter([1, 2]), doubled(), map(abs, iter([1, 2]))], ids=str
)
def test_an_iterator_that_was_advanced_is_refused(held: Iterator[Any]) -> None:
    state = PythonState(Noted(held))
    state.restore()
    next(held)
    with pytest.raises(ShardwiseError, match=r"held is an iterator .* has advanced it: it cannot be wound back"):
        state.restore()
