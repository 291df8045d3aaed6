import numpy as np
import pytest

from shardwise.sharding.tensor.channel_labels import UnionFind


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_of_joining_one_pair_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, group_of = UnionFind(), dict[int, set[int]]()
    for _ in range(6):
        count = int(rng.integers(1, 60))
        first = groups.new(count)
        group_of |= {label: {label} for label in range(first, first + count)}
        pairs = rng.integers(-1, len(group_of), (2, int(rng.integers(0, 40))))
        groups.join(*pairs)
        for one, other in pairs.T.tolist():
            if min(one, other) >= 0:
                both = group_of[one] | group_of[other]
                group_of |= dict.fromkeys(both, both)
        labels = np.arange(-1, len(group_of))
        assert groups.roots(labels).tolist() == [-1, *(min(group_of[label]) for label in labels[1:].tolist())]


def test_a_chain_of_a_million_labels_is_one_group() -> None:
    groups, count = UnionFind(), 1_000_000
    labels = np.arange(groups.new(count), count)
    groups.join(labels[1:], labels[:-1])
    assert not groups.roots(labels).any()
    assert groups.roots(np.array([-1])).tolist() == [-1]
