"""Which units a forward calls, where a rank has all of them: parts of a batch must go one way."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.stages.split.route import Route


def test_parts_of_a_batch_that_call_different_units_are_refused_and_the_next_batch_may_go_another_way() -> None:
    route = Route(["embed", "block", "head"])
    route.end(["embed", "head"])
    with pytest.raises(ShardwiseError, match="parts of one batch call different units"):
        route.end(["embed", "block", "head"])
    route.begin()
    route.end(["embed", "block", "head"])


def test_bits_tell_ways_apart_and_are_none_for_that_of_the_example() -> None:
    route = Route(["embed", "block", "head"])
    found = []
    for way in (["embed", "block", "head"], ["embed", "head"], ["embed", "block", "block", "head"]):
        route.begin()
        route.end(way)
        found.append(route.bits)
    assert found[0] == 0
    assert len(set(found)) == 3
