"""A rank that raises alone, and lives on, leaves nobody waiting: all know who it was and what it said."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.ranks import alone

#: A wait that nobody ends would last half an hour: then the ranks are given up on, and the test fails.
LIMIT_SECONDS = 120
PLACES = ("the arguments", "the plan", "the forward", "the loss", "the factory", "the first batch", "a look", "a run")


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("tp=2", marks=pytest.mark.whole), "pp=2,microbatches=2"])
def test_a_rank_that_raises_alone_is_named_by_the_others(two: Ranks, plan: str) -> None:
    for where in PLACES:
        first, second = two.run(alone.told, where, plan, timeout_seconds=LIMIT_SECONDS)
        # The plan is told by all alike: the ranks have compared theirs.
        kind, problem = first
        assert kind == "RankError", (where, first, second)
        assert problem.startswith("rank 1 failed"), (where, problem)
        own, said = second
        assert own in ("ValueError", "ShardwiseError"), (where, second)
        assert said in problem, (where, problem)
