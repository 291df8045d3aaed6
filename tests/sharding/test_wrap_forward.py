"""A wrapped module is copied as it is, and pickled as what it was."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.sharding.wrap_forward import wrap_forward


def twice(forward: Any, *args: Any) -> Any:
    return 2 * forward(*args)


def wrapped(times: int) -> tuple[nn.Linear, Tensor]:
    layer = nn.Linear(3, 3)
    x = torch.ones(1, 3)
    own = layer(x)
    for _ in range(times):
        wrap_forward(layer, twice)
    assert torch.equal(layer(x), 2**times * own)
    return layer, own


@pytest.mark.parametrize("times", [1, 2])
def test_copies_are_wrapped_and_have_weights_of_their_own_only_if_they_are_deep(times: int) -> None:
    layer, own = wrapped(times)
    x = torch.ones(1, 3)
    shallow, deep = copy.copy(layer), copy.deepcopy(layer)
    for each in (shallow, deep):
        assert type(each) is type(layer)
        assert torch.equal(each(x), 2**times * own)
    assert shallow.weight is layer.weight
    assert deep.weight is not layer.weight


@pytest.mark.parametrize("times", [1, 2])
def test_a_pickle_names_the_original_class_and_has_its_forward(times: int) -> None:
    layer, own = wrapped(times)
    torch.save(nn.Sequential(layer), file := io.BytesIO())
    file.seek(0)
    for each in (pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)[0]):
        assert type(each) is nn.Linear
        assert torch.equal(each(torch.ones(1, 3)), own)


class Kept(nn.Linear):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return Kept, (self.in_features, self.out_features)


def test_a_module_that_says_itself_how_it_is_pickled_is_asked() -> None:
    layer = Kept(3, 2)
    wrap_forward(layer, twice)
    assert layer.__reduce_ex__(2) == (Kept, (3, 2))
