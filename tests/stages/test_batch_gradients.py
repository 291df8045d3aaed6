"""Entries of a batch that want a gradient, where rows are cut."""

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.stages.rows import RowRule, check_openable, take_rows


def test_rows_of_a_leaf_are_a_leaf_each_so_that_its_gradient_is_not_that_of_some_rows() -> None:
    batch = {"x": torch.ones(4, 2, requires_grad=True), "y": torch.ones(4)}
    part = take_rows(batch, RowRule().look(batch), 0, 2)
    part["x"].square().sum().backward()
    assert part["x"].is_leaf
    assert batch["x"].grad is None


def test_what_was_computed_with_a_gradient_is_refused() -> None:
    with pytest.raises(ShardwiseError, match=r"x was computed with a gradient.*\n  try: compute it in the module"):
        check_openable({"x": torch.ones(4, 2, requires_grad=True) * 2})
