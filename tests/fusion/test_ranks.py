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


@pytest.mark.parametrize(
    "plans",
    [["dp=2,zero=1"], pytest.param(["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2"], marks=pytest.mark.whole)],
    ids=["zero=1", "others"],
)
def test_steps_of_fused_adamw_on_16_bits_are_taken_by_the_kernel(two: Ranks, plans: list[str]) -> None:
    """Three steps change a weight by .03, and the norm's, which are 1, have no bits below 2^-7. Numbers of a step are
    compared in `tests/kernels/test_adamw.py`."""
    for found in two.run(ranks.stepped, plans, torch.bfloat16):
        for plan, (worst, launches, said) in zip(plans, found, strict=True):
            assert launches == 3, plan
            assert worst <= 2**-7, plan
            assert "x step of fused Adam" in said


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [("dp=2,zero=1", torch.float32), ("dp=2,offload.optimizer=0.5", torch.bfloat16)],
    ids=["float32", "on the host"],
)
def test_torch_takes_the_other_steps(two: Ranks, plan: str, dtype: torch.dtype) -> None:
    for ((_, launches, said),) in two.run(ranks.stepped, [plan], dtype):
        assert launches == 0
        assert "fused Adam" not in said
