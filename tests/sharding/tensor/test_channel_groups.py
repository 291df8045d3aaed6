"""What stands between and beside linear layers that are cut: found, cut with them, or said."""

from typing import Any

import numpy as np
import pytest
import torch

from shardwise.ranks.spawn import Ranks
from shardwise.sharding.tensor.channel_groups import trace
from shardwise.sharding.tensor.channel_labels import distinct, is_expanded, moved
from shardwise.stages.split.meta import meta_twin
from tests.crowd import Crowds
from tests.sharding.tensor import channel_nets, programs


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_gradients_are_those_of_the_whole_whatever_stands_between(num_ranks: int, crowds: Crowds) -> None:
    """Five heads and 25 channels, which neither 2 nor 3 ranks divide, and as odd a number of tokens."""
    kinds: list[tuple[str, ...]] = [(each,) for each in channel_nets.BETWEEN]
    kinds += [("glu", each) for each in channel_nets.BESIDE]
    # Sequences are shared or not, in turn; where two ranks have seen the one, three see the other.
    cases: list[Any] = [
        (channel_nets.net, kind, {"sequence": (index + num_ranks) % 2 == 0}) for index, kind in enumerate(kinds)
    ]
    for outcomes in crowds.of(num_ranks).run(programs.parities, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome.loss < 1e-5, case
            assert outcome.worst < 1e-5, (case, outcome.where)
            assert outcome.norm < 1e-5, case


def test_a_number_for_each_channel_or_head_goes_where_that_goes(two: Ranks) -> None:
    first, second = two.run(programs.parity, channel_nets.net, ("a number for each channel",))
    assert [each.local_sizes["blocks.1.feed.scale"] for each in (first, second)] == [(13,), (12,)]
    assert [each.local_sizes["blocks.1.attention.temperature"] for each in (first, second)] == [(3, 1, 1), (2, 1, 1)]
    # One that all heads use alike stays whole.
    assert first.local_sizes["blocks.1.attention.scale"] == (4,)
    assert "blocks.*.feed.scale: numbers over 2 ranks: 13 + 12" in first.description


def test_parameters_of_heads_are_found_in_models_that_say_nothing_of_them(two: Ranks) -> None:
    """The plan of GPT-OSS names its head alone; the rest is found."""
    cases: list[Any] = [
        (channel_nets.with_head_parameters, (family,), {"sequence": True}) for family in ("gpt-oss", "cohere")
    ]  # fmt: skip
    for sinks, norms in two.run(programs.parities, cases):
        for outcome in (sinks, norms):
            assert outcome.loss < 1e-5
            assert outcome.worst < 1e-5, outcome.where
        assert sinks.local_sizes["model.layers.0.self_attn.sinks"] == (2,)
        assert norms.local_sizes["model.layers.0.self_attn.q_norm.weight"] == (2, 8)


def test_a_module_that_counts_on_all_channels_is_left_whole_or_refused_where_it_is_named(two: Ranks) -> None:
    named = {"*.up": "column", "*.down": "row"}
    assert two.run(programs.refusal, channel_nets.rigid, (), {})[0] == ""
    said = two.run(programs.refusal, channel_nets.rigid, (), {"spec": named})[0]
    assert "cannot be cut: 0 cannot work with a part of its channels: " in said
    assert said.endswith('": "whole"}, or tp=1')


def test_tokens_cost_nothing_while_a_module_is_looked_at() -> None:
    """Of attention over 100,000 tokens the weights alone would take terabytes."""
    module, _ = channel_nets.net("several at once")
    twin = meta_twin(module)
    layers = {name: each for name, each in twin.named_modules() if hasattr(each, "weight") and "norm" not in name}
    layers = {name: each for name, each in layers.items() if not isinstance(each, torch.nn.LayerNorm)}
    seen = trace(twin, layers, (torch.zeros(2, 100_000, dtype=torch.long, device="meta"),), {})
    read = seen.groups.roots(seen.layers["blocks.1.attention.out"].read[0])
    assert len(np.unique(read)) == 5


@pytest.mark.parametrize(
    ("name", "shape", "arguments"),
    [
        ("view", (2, 7, 12), ((2, 7, 3, 4),)),
        ("view", (2, 7, 3, 4), ((14, 3, 4),)),
        ("view", (2, 3, 7, 4), ((6, 7, 4),)),
        ("clone", (2, 7, 4), ()),
        ("transpose", (2, 7, 4), (1, 2)),
        ("slice", (2, 7, 4), (2, 1, 3)),
    ],
)
def test_labels_are_moved_as_values_are_and_go_on_repeating(
    name: str, shape: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    varies = [dim for dim, size in enumerate(shape) if size in (3, 4, 12)]
    lengths = [size if dim in varies else 1 for dim, size in enumerate(shape)]
    labels = torch.arange(int(np.prod(lengths))).view(lengths).expand(shape)
    func = getattr(torch.ops.aten, name)
    func = func.int if name == "transpose" else func.Tensor if name == "slice" else func.default
    expected = func(labels.contiguous(), *arguments)
    (found,) = moved(func, name, (labels, *arguments), {}, expected)
    assert torch.equal(found, expected)
    assert is_expanded(found)


def test_labels_are_joined_along_a_dim_without_what_repeats() -> None:
    some = [torch.arange(3).expand(2, 100, 3), torch.arange(3, 5).expand(2, 100, 2)]
    expected = torch.cat(some, -1)
    (found,) = moved(torch.ops.aten.cat.default, "cat", (some, -1), {}, expected)
    assert torch.equal(found, expected)
    assert [tuple(each.shape) for each in distinct([found])] == [(1, 1, 5)]
