"""Models of Hugging Face, unmodified, cut over ranks: the loss and every gradient are those of the whole model."""

from typing import Any

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.tensor import programs
from tests.stages.families import FAMILIES

Case = dict[str, Any]
#: One of each way in which heads, keys and channels are written. All have 4 heads and most 2 key heads: on 3 ranks
#: heads are uneven, on 4 every key head is on two ranks.
KINDS = ["gpt2", "llama", "qwen3", "phi3", "bloom", "falcon", "mixtral", "t5"]
#: Those that show what is new on 3 ranks, uneven heads, and on 4, key heads on two ranks. `--whole` runs all.
UNEVEN = ["gpt2"]
REPEATED = ["llama"]
#: Of two ranks, those with sequences that are not shared too: of the others a kind is here or on four ranks.
BOTH_WAYS = ["gpt2", "deepseek-v3", "t5", "vit"]


WHOLE: Case = {}
SHARED: Case = {"sequence": True}
#: With the trial: it must find nothing wrong with a model that is cut as it should be.
TRIED: Case = {"sequence": True, "verify": True}


def check(ranks: Ranks, family: str, *ways: Case) -> None:
    # Neither 2 nor 3 nor 4 ranks divide 13 tokens, or the 17 patches of an image.
    cases: list[Any] = [(programs.family, (family, 13 if way else 12), way) for way in ways]
    for outcomes in ranks.run(programs.parities, cases, timeout_seconds=300):
        for outcome in outcomes:
            assert outcome.loss < 1e-5
            assert outcome.worst < 1e-5, outcome.where
            assert outcome.norm < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same_model_on_two_ranks_with_and_without_a_shared_sequence(two: Ranks, family: str) -> None:
    check(two, family, *((WHOLE, TRIED) if family in BOTH_WAYS else (TRIED,)))


def some(families: list[str]) -> list[Any]:
    return [pytest.param(each, marks=() if each in families else pytest.mark.whole) for each in KINDS]


@pytest.mark.parametrize("family", some(UNEVEN))
def test_a_family_is_the_same_model_on_three_ranks_that_share_sequences(three: Ranks, family: str) -> None:
    check(three, family, SHARED)


@pytest.mark.parametrize("family", some(REPEATED))
def test_a_family_is_the_same_model_on_four_ranks(four: Ranks, family: str) -> None:
    check(four, family, WHOLE)
