"""Modules whose experts are shared out, in stages: split with and without numbers, gone back in two halves."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.expert import programs


@pytest.mark.parametrize("model", ["ours like mixtral", "ours like deepseek", "mixtral", "deepseek-v3"])
def test_gradients_go_back_in_two_halves_and_only_the_first_talks(two: Ranks, model: str) -> None:
    for outcome in two.run(programs.in_stages, model, "dp=2,ep=2", timeout_seconds=120):
        assert outcome.loss < 1e-5
        assert outcome.worst < 1e-5, outcome.where
        assert outcome.calls["I"] >= 2
        assert outcome.calls["W"] == 0


@pytest.mark.parametrize("model", ["ours like deepseek", "qwen2-moe", "gpt-oss", "deepseek-v3"])
def test_a_module_without_numbers_is_split_without_a_word_between_ranks(two: Ranks, model: str) -> None:
    for outcome in two.run(programs.in_stages, model, "dp=2,ep=2", True, timeout_seconds=120):
        assert outcome.calls == {}
