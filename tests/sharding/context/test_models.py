"""Unmodified models whose tokens are shared out: loss and every gradient as on one device."""

import pytest
from torch import Tensor

from shardwise.ranks.spawn import Ranks
from shardwise.sharding.context.mask import Mask
from tests.sharding.context.models import pipelined_results, plain_results, shared_results, tried_minimax

DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gpt2"]


def compare(ranks: Ranks, name: str, kind: str, length: int, form: str, masks: Mask | None = None) -> None:
    same(ranks.run(shared_results, name, kind, length, form, masks), plain_results(name, kind, length))


def same(results: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for found in results:
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            assert (found[name] - each).abs().max() <= 1e-5 * each.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("form", ["ring", "all-to-all"])
@pytest.mark.parametrize("name", [*DECODERS, "bert", "own", "own with attend"])
def test_loss_and_gradients_are_those_of_the_plain_module(three: Ranks, name: str, form: str) -> None:
    compare(three, name, "whole", 24, form)


@pytest.mark.parametrize("name", [*DECODERS, "bert", "own"])
def test_tokens_that_are_added_change_nothing(three: Ranks, name: str) -> None:
    compare(three, name, "whole", 23, "ring")


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_padding_is_seen_by_nobody(three: Ranks, name: str) -> None:
    compare(three, name, "padded", 24, "ring")


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents_do_not_see_each_other(three: Ranks, name: str) -> None:
    compare(three, name, "packed", 22, "ring")


def test_masks_of_a_module_mean_what_the_user_says(three: Ranks) -> None:
    compare(three, "own with a mask", "whole", 24, "ring", Mask(causal=True))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_stages_may_be_recomputed_and_go_back_in_two_halves(three: Ranks, name: str) -> None:
    same(three.run(pipelined_results, name, 23), plain_results(name, "whole", 23))


def test_layers_of_transformers_that_mix_tokens_by_themselves_are_noticed(two: Ranks) -> None:
    """MiniMax's linear attention was off by 2e-4, and nothing noticed."""
    for _, problem in two.run(tried_minimax, ("linear_attention", "full_attention")):
        assert "layers.0.self_attn.norm of MiniMaxForCausalLM: a part of a sequence gives other numbers" in problem
    assert two.run(tried_minimax, ("full_attention", "full_attention")) == [(True, "")] * 2
