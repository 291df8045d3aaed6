"""Labels below 0 reach no operation that could take them for indices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardwise.stages.index_check import IndexCheck

_SCORES = torch.randn(4, 5)
_LABELS = torch.tensor([3, -100, 1, 0])


@pytest.mark.parametrize(
    "use",
    [
        lambda labels: functional.cross_entropy(_SCORES, labels),
        lambda labels: functional.cross_entropy(_SCORES, labels, reduction="sum") / (labels != -100).sum(),
        lambda labels: _SCORES.gather(1, labels.clamp(min=0)[:, None]),
        lambda labels: _SCORES[labels != -100],
        lambda labels: _SCORES.roll(1, 0)[labels.clamp(min=-4)],
        lambda labels: functional.embedding(labels.masked_fill(labels < 0, 0), _SCORES),
    ],
)
def test_labels_that_are_handled_pass(use: Callable[[Tensor], Tensor]) -> None:
    with IndexCheck("cpu"):
        found = use(_LABELS)
    assert torch.equal(found, use(_LABELS))


@pytest.mark.parametrize(
    "use",
    [
        lambda labels: functional.cross_entropy(_SCORES, labels, ignore_index=-1),
        lambda labels: _SCORES.gather(1, labels[:, None]),
        lambda labels: functional.embedding(labels, _SCORES),
        lambda labels: torch.zeros(4, 5).scatter_(1, labels[:, None], 1.0),
        lambda labels: torch.bincount(labels),
        lambda labels: _SCORES[labels],
    ],
)
def test_labels_that_are_indices_are_refused_before_they_are_used(use: Callable[[Tensor], Tensor]) -> None:
    with IndexCheck("cpu"), pytest.raises(IndexError, match="which may be an index"):
        use(_LABELS)
