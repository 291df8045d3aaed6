"""Outputs of microbatches, joined; gradients, cut."""

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.stages.outputs import Joint

CPU = torch.device("cpu")


def test_rows_are_put_one_under_the_other_numbers_averaged_by_rows_and_the_rest_is_the_first() -> None:
    same = torch.arange(5)
    outputs = [
        {"logits": torch.full((rows, 2), float(rows)), "loss": torch.tensor(float(rows)), "table": same, "name": "x"}
        for rows in (3, 1)
    ]
    joint = Joint(outputs, [3, 1])
    whole = joint.filled({number: joint.joined(number, CPU) for number in joint.tensors})
    assert whole["logits"][:, 0].tolist() == [3, 3, 3, 1]
    assert whole["loss"].item() == pytest.approx(3 * 0.75 + 1 * 0.25)
    assert torch.equal(whole["table"], same)
    assert whole["name"] == "x"


def test_gradients_go_to_the_rows_they_are_of() -> None:
    parts = [torch.randn(rows, 2, requires_grad=True) for rows in (3, 1)]
    losses = [torch.randn((), requires_grad=True) for _ in range(2)]
    joint = Joint(list(zip(parts, losses, strict=True)), [3, 1])
    assert joint.differentiable == [0, 1]
    gradient = torch.randn(4, 2)
    starts = joint.starts(0, gradient)
    assert all(start is not None and start[0] is part for start, part in zip(starts, parts, strict=True))
    assert torch.equal(torch.cat([start[1] for start in starts if start is not None]), gradient)
    assert [float(start[1]) for start in joint.starts(1, torch.tensor(2.0)) if start is not None] == [1.5, 0.5]


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(ShardwiseError, match=r"returns a tensor of shape \(5,\) \(number 1 of its output\)"):
        Joint([torch.zeros(5), torch.ones(5)], [2, 2])
    with pytest.raises(ShardwiseError, match=r"for microbatch 1 and .* for microbatch 0"):
        Joint([[torch.zeros(2)], (torch.zeros(2),)], [2, 2])
