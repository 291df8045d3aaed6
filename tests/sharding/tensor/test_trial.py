"""A cut is tried before it is made: what is tried, what is not, and what is told. No process but this one."""

import math
import random
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.ranks.simulated import SimulatedGroup
from shardwise.sharding.stand_in import another, examples_of
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
    calls: SimpleQueue[torch.dtype] = SimpleQueue()  # A list would be left as it was.

    def between(h: Tensor) -> Tensor:
        if not h.is_meta:
            calls.put(h.dtype)
        return h.tanh()

    cut(between, num_blocks=9)
    # Two blocks of the whole, and of each of two ranks.
    assert [calls.get_nowait() for _ in range(calls.qsize())] == [torch.float64] * 6


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


class AtRest(nn.Module):
    """Its layers rest for one call of two, as a critic does in one module with its maker."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed(torch.tanh)

    def forward(self, input: Tensor) -> Tensor:
        self.feed.requires_grad_(False)
        judged: Tensor = self.feed(input)
        self.feed.requires_grad_(True)
        made: Tensor = judged + self.feed(input * 2)
        return made


def test_a_forward_that_has_parameters_rest_does_so_for_its_own_copy_alone() -> None:
    """The ranks of a trial are threads. With one parameter for all, what differed was chance, and with it what each
    process made of it."""
    whole = AtRest()
    copies = [another(whole), another(whole)]
    copies[0].requires_grad_(False)
    assert all(each.requires_grad for module in (whole, copies[1]) for each in module.parameters())
    assert [each.data_ptr() for each in copies[0].parameters()] == [each.data_ptr() for each in whole.parameters()]
    sharding = shard(AtRest(), SimulatedGroup(0, 2), example={"input": torch.randn(2, 3, 8)})
    assert {"feed.up", "feed.down"} == sharding.cut.keys()


class Started(Feed):
    """Takes its numbers from the first batch that it sees, as Glow's ActNorm does."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.scale, self.has_started = nn.Parameter(torch.ones(8)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_started:
            with torch.no_grad():
                self.scale.copy_(1 / x.std((0, 1)))
            self.has_started = True
        return super().forward(x * self.scale)


def test_torchs_attention_is_no_draw_and_sequences_are_shared_out() -> None:
    """torch marks it as one that draws even if it drops nothing: `sp=true` was off for every transformer."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=4)
    module = Transformer(Settings(vocabulary=32, width=16, num_layers=2, length=8, attention=heads, mlp=Mlp(width=24)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharding = shard(
            module, SimulatedGroup(0, 2), example={"input_ids": torch.arange(16).view(2, 8)}, sequence=True
        )
    assert sharding.is_along_sequence
    assert "layers.0.attention.q_proj" in sharding.cut


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Started(), Started()])

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input


def test_a_forward_that_writes_to_parameters_is_tried_with_memory_of_its_own() -> None:
    """Blocks that are alike are one on the copy, and the second wrote over what the first had kept for its backward:
    nothing was compared, and a part of the tokens was taken for all."""
    example = {"input": torch.randn(2, 4, 8)}
    with pytest.warns(UserWarning, match="sp=true shares out nothing, since with a part of the tokens"):
        sharding = shard(Blocks(), SimulatedGroup(0, 2), example=example, sequence=True)
    assert sharding.cut
    assert not sharding.unverified


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_nested_tensor_is_refused_before_its_tokens_are_counted(all_tokens: bool) -> None:
    rows = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    with pytest.raises(ShardwiseError, match="nested tensor, of which no rows can be taken"):
        examples_of({"rows": rows}, nn.Linear(4, 4), all_tokens=all_tokens)
