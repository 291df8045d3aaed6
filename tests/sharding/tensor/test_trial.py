"""A cut is tried before it is made: what is tried, what is not, and what is told. No process but this one."""

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.simulated import SimulatedGroup
from shardwise.sharding.tensor import Sharding, shard


class Feed(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 12), nn.Linear(12, 8), between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.between(self.up(x)))
        return made


def rooted(h: Tensor) -> Tensor:
    return h.relu() / math.sqrt(h.shape[-1])


def cut(between: Callable[[Tensor], Tensor], num_blocks: int = 2, **options: Any) -> tuple[Sharding, list[str]]:
    """A list of blocks cut as the first of two ranks would, and what was told."""
    module = nn.Sequential(*(Feed(between) for _ in range(num_blocks)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sharding = shard(module, SimulatedGroup(0, 2), example={"input": torch.randn(2, 3, 8)}, **options)
    return sharding, [str(each.message) for each in told]


def test_numbers_find_what_shapes_do_not_and_are_not_compared_where_that_is_not_wanted() -> None:
    tried, told = cut(rooted)
    assert not tried.cut
    assert "whole on every rank, since what 0.down returns differs by" in told[0]
    untried, told = cut(rooted, verify=False)
    assert {"0.up", "1.down"} <= untried.cut.keys()
    assert not told


def test_what_is_right_is_cut_without_a_word() -> None:
    sharding, told = cut(torch.tanh)
    assert {"0.up", "0.down", "1.up", "1.down"} == sharding.cut.keys()
    assert not told
    assert not sharding.unverified


def test_a_layer_that_is_named_is_refused_and_not_left_whole() -> None:
    with pytest.raises(ShardwiseError, match=r"0\.up cannot be cut: what 0\.down returns differs by") as caught:
        cut(rooted, spec={"*.up": "column", "*.down": "row"})
    assert str(caught.value).endswith('try: tensor={"0.up": "whole"}, or tp=1')


def test_of_many_blocks_that_are_alike_the_first_and_the_last_are_run() -> None:
    calls: list[torch.dtype] = []

    def between(h: Tensor) -> Tensor:
        if not h.is_meta:
            calls.append(h.dtype)
        return h.tanh()

    cut(between, num_blocks=9)
    # Two blocks of the whole, and of each of two ranks.
    assert calls == [torch.float64] * 6


def test_a_module_that_never_computes_the_same_is_not_compared_and_says_so() -> None:
    sharding, _ = cut(lambda h: h * random.random())
    assert {"0.up", "0.down"} <= sharding.cut.keys()
    assert "not compared with the whole module: the module computes something else whenever it is called" in (
        sharding.describe()
    )


def test_noise_and_dropout_are_no_difference() -> None:
    def between(h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.5) + torch.randn_like(h)

    sharding, told = cut(between)
    assert {"0.up", "0.down"} <= sharding.cut.keys()
    assert not told
    assert not sharding.unverified
