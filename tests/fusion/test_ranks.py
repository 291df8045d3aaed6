"""Unmodified models with kernels over two ranks: the head cut over tp, sequences cut, weights that come and go."""

import pytest
import torch

from shardwise.ranks.spawn import Ranks
from tests.fusion import ranks
from tests.fusion.models import make, make_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of these tests are on CPUs")

CASES = [("llama", "tp=2,sp=true")]
MORE = [("gemma2", "tp=2"), ("llama", "dp=2,zero=3"), ("qwen3", "cp=2"), ("mixtral", "dp=2,ep=2"), ("mixtral", "tp=2")]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.whole)], ids=["tp", "others"])
def test_over_ranks_losses_and_gradients_are_those_of_one_device_and_no_rank_has_whole_logits(
    two: Ranks, cases: list[tuple[str, str]]
) -> None:
    for found in two.run(ranks.both, cases):
        for (name, plan), (mine, plain, worst, waited, said) in zip(cases, found, strict=True):
            total, count = ranks.loss_for(plan)(make(name).train()(**make_batch(), use_cache=False), make_batch())
            assert mine[0] == pytest.approx((total / count).item(), rel=1e-5), plan
            assert mine == pytest.approx(plain, rel=1e-5), plan
            assert worst < 1e-5, plan
            assert waited[0], plan
            assert "kernels in place of" in said


def test_a_head_that_is_cut_over_ranks_has_the_loss_of_plain_operators(two: Ranks) -> None:
    for (plain, kind), (mine, same) in two.run(ranks.with_a_head_that_is_cut):
        assert kind == same == "VocabularyHead"
        assert mine == pytest.approx(plain, rel=1e-5)
