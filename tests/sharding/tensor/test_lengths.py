"""Sequences that the ranks do not divide, shared out: the same model as on one device, whatever their lengths."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.nets.settings import Mixture
from shardwise.parity.check import check
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.stages.split import split
from tests.crowd import Crowds
from tests.engine.composed import token_loss
from tests.sharding.tensor import lengths, programs
from tests.stages.families import make_family

EXPERTS = Mixture(num_experts=4, num_chosen=2, width=16, auxiliary=0.01)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_pieces_of_unequal_lengths_and_empty_ones_give_the_same_gradients(num_ranks: int, crowds: Crowds) -> None:
    sizes = (1, 5) if num_ranks == 2 else (2, 3, 13)
    cases: list[Any] = [(programs.net, (97, 24, 4, 4, 0.0, length), {"sequence": True}) for length in sizes]
    for outcomes in crowds.of(num_ranks).run(programs.parities, cases):
        for outcome in outcomes:
            assert outcome.loss < 1e-5
            assert outcome.worst < 1e-5, outcome.where
            assert outcome.norm < 1e-5


@pytest.mark.parametrize(
    ("text", "make", "options"),
    [
        ("tp=2,sp=true,microbatches=2,recompute=full", partial(lengths.dropping, family="gpt2"), {}),
        pytest.param("tp=4,sp=true", lengths.ours, {"mixture": EXPERTS}, marks=pytest.mark.whole),
        # In chunks it is run by `test_communication.py`.
        pytest.param(
            "tp=2,sp=true,pp=2,microbatches=4,schedule=zb-v",
            partial(lengths.dropping, family="gpt2"),
            {},
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "tp=2,sp=true,pp=2,microbatches=2,schedule=zb-h1",
            lengths.ours,
            {"through_blocks": True},
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "dp=2,tp=2,sp=true,zero=3", partial(lengths.dropping, family="mixtral"), {}, marks=pytest.mark.whole
        ),
        # Six of twelve tokens are a rank's of cp, and four ranks share them out.
        pytest.param("tp=2,cp=2,sp=true", lengths.ours, {}, marks=pytest.mark.whole),
        pytest.param("tp=4,cp=2,sp=true", lengths.ours, {}, marks=pytest.mark.whole),
    ],
)
def test_batches_of_changing_lengths_train_as_on_one_device(
    text: str, make: Any, options: dict[str, Any], crowds: Crowds
) -> None:
    plan = Plan.parse(text)
    sizes = (11, 12, 9) if plan.cp > 1 else lengths.LENGTHS
    verdict = check(plan, partial(make, plan, sizes, **options), ranks=crowds.of(plan.num_ranks))
    assert verdict.comparison.first is None


def test_batches_of_changing_lengths_are_evaluated_in_stages(four: Ranks) -> None:
    text = "tp=2,sp=true,pp=2,microbatches=2"
    found = four.run(lengths.evaluated, text, "llama", (8, 7, 8, 1))
    module = make_family("llama").eval()
    for number, batch in enumerate(lengths.batches(Plan.parse(text), (8, 7, 8, 1), 97)):
        with torch.no_grad():
            total, count = token_loss(module(input_ids=batch["input_ids"]), batch)
        for losses in found:
            assert losses[number] == pytest.approx(float(total / count), rel=1e-5)


class Whole(nn.Linear):
    """Makes something as long as the whole of what it is given a half of."""

    length = 0

    def forward(self, half: Tensor) -> Tensor:
        return super().forward(functional.pad(half, (0, 0, 0, self.length - half.shape[1])))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Whole(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.first.length = x.shape[1]
        whole = self.first(x[:, : -(-x.shape[1] // 2)])
        assert whole.shape == x.shape, "what stands in for the whole is as long as another batch was"
        out: Tensor = self.third(self.second(whole))
        return out


def test_what_stands_in_for_a_whole_is_as_long_as_the_batch() -> None:
    """Halves of sequences of 8 and of 7 tokens are of one shape; the third stage sees what the first makes of them."""
    stages = split(Halved(), 3, {"x": torch.zeros(2, 8, 1)}).stages
    for length in (8, 7, 8):
        values: dict[str, Tensor] = {}
        for stage in stages:
            assert stage is not None
            with torch.no_grad():
                made, _ = stage.run(values, {"x": torch.zeros(2, length, 1)})
            values |= made
