"""A vocabulary that is shared out: its cross entropy, and scores that look like the whole."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.tensor import programs


@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("words", [8, 97, 1])
def test_the_cross_entropy_of_shards_is_that_of_the_whole(two: Ranks, words: int, smoothing: float, kind: str) -> None:
    for loss, gradient in two.run(programs.entropy, words, smoothing, kind, timeout_seconds=60):
        assert loss < 1e-5
        assert gradient < 1e-5  # Of gradients of up to 10.


def test_scores_look_like_the_whole_and_are_gathered_only_where_words_meet(two: Ranks) -> None:
    stays = {"shape", "float", "view", "flatten", "rows", "all rows", "last token"}
    for found in two.run(programs.scored, timeout_seconds=60):
        assert {name for name, stayed in found.items() if stayed} == stays
