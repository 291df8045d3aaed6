"""Columns of candidates: what depends on a few of them is computed once for each combination."""

import numpy as np
import pytest

from shardwise.cost.layouts import Layouts


@pytest.mark.parametrize("num_values", [1, 3])
def test_candidates_that_agree_in_some_columns_are_taken_once(num_values: int) -> None:
    """Columns with one value and with several, in front of each other; the order is that of their values."""
    draw = np.random.default_rng(0)
    layouts = Layouts.of(
        tp=draw.integers(1, 1 + num_values, 40), microbatch=4, cp=draw.integers(1, 4, 40), dp=range(40)
    )
    some, inverse = layouts.distinct(("microbatch", "tp", "cp"))
    rows = np.stack([layouts.microbatch, layouts.tp, layouts.cp], axis=1)
    expected, kinds = np.unique(rows, axis=0, return_inverse=True)
    assert np.array_equal(np.stack([some.microbatch, some.tp, some.cp], axis=1), expected)
    assert np.array_equal(inverse, kinds.reshape(-1))


def test_no_candidates_have_no_combination() -> None:
    some, inverse = Layouts.of(tp=[2]).take(slice(0, 0)).distinct(("tp", "cp"))
    assert len(some) == len(inverse) == 0
