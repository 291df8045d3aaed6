"""What a forward leaves in plain Python is noted, told and put back."""

import random
from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.remembered import forgotten
from shardwise.stages.split.second_batch import second_batch
from shardwise.stages.split.split import split


class Leaves(nn.Module):
    """Leaves a trace of every kind."""

    shared: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count, self.found, self.last, self.names = 0, [1.0], deque([1], maxlen=3), {"a"}
        self.board = torch.zeros(2)
        caught: dict[str, Any] = {}
        self.caught = caught
        self.layer.register_forward_hook(lambda _, __, output: caught.update(out=output))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.found.append(2.0)
        self.last.append(2)
        self.names.add("b")
        self.shared.append(3)
        self.board[0] += 1
        self.new = random.random()
        made: Tensor = self.layer(x)
        return made


def test_everything_is_put_back_and_told_before() -> None:
    module = Leaves()
    drawn, state = random.getstate(), PythonState(module)
    assert state.changed() == {}
    module(torch.ones(1, 4))
    told = state.changed()
    assert told["count"] == "0, then 1"
    assert told["new"].startswith("float 0.")
    assert told["found"] == "1 entries, then 2"
    assert told["board"] == "a tensor, written in place"
    assert {"last", "names", "Leaves.shared"} <= told.keys()
    assert any(name.endswith("out") for name in told)
    assert state.results() != []
    state.restore()
    assert state.changed() == {}
    assert (module.count, module.found, list(module.last), module.names) == (0, [1.0], [1], {"a"})
    assert (module.shared, module.caught, module.board.tolist()) == ([], {}, [0.0, 0.0])
    assert not hasattr(module, "new")
    assert random.getstate() == drawn


def test_a_split_leaves_no_trace() -> None:
    module = nn.Sequential(Leaves(), Leaves())
    state = PythonState(module)
    split(module, 2, {"input": torch.ones(2, 4)})
    assert [name for name in state.changed() if "_compiled_call_impl" not in name] == []


def test_a_second_batch_has_other_numbers_that_the_first_has_too() -> None:
    first = {"ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "mask": torch.ones(3, 2), "flag": True}
    second = second_batch(first)
    assert second["ids"].tolist() == [[5, 6], [5, 6], [3, 4]]
    assert second["mask"].tolist() == [[0.75, 0.75]] * 3
    assert second["flag"] is True
    four = second_batch({"ids": torch.tensor([[1], [2], [3], [4]])})["ids"].flatten().tolist()
    assert four == [4, 4, 4, 3], "the third row, too, has another in its place"
    alike = {"ids": torch.tensor([[1, 2, 3], [1, 2, 3]])}
    assert second_batch(alike)["ids"].tolist() == [[3, 3, 2], [3, 3, 2]]
    assert second_batch(alike, [alike, first]) is first


@cache
def drawn(width: int) -> Tensor:
    return torch.randn(width)


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * drawn(len(x))


def test_what_functions_remember_of_trials_is_forgotten_and_what_they_had_is_kept() -> None:
    drawn.cache_clear()
    first = drawn(2)
    module = Remembers()
    with forgotten(module):
        module(torch.ones(3))
        assert drawn.cache_info().currsize == 2
    assert drawn.cache_info().currsize == 1
    assert drawn(2) is first
