"""While a module is tried nothing drops: in training mode it computes what it does in evaluation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from shardwise.stages.steady_draws import steady

WAYS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "nn.Dropout": lambda rows, training: nn.Dropout(0.3).train(training)(rows),
    "nn.Dropout in place": lambda rows, training: nn.Dropout(0.3, inplace=True).train(training)(rows.clone()),
    "functional.dropout": lambda rows, training: dropout(rows, 0.3, training),
    "torch.dropout": lambda rows, training: torch.dropout(rows, 0.3, training),
    "by names": lambda rows, training: torch.dropout(input=rows, p=0.3, train=training),
    "attention": lambda rows, training: scaled_dot_product_attention(rows, rows, rows, None, 0.3 * training),
    "attention by name": lambda rows, training: scaled_dot_product_attention(
        rows, rows, rows, dropout_p=0.3 * training
    ),
    "everything": lambda rows, training: dropout(rows, 1.0, training),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_drops_in_training_does_not_drop(way: str) -> None:
    rows = torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4)
    with steady():
        found = WAYS[way](rows, True)
    wanted = torch.zeros_like(rows) if way == "everything" else WAYS[way](rows, False)
    assert torch.equal(found, wanted)
    assert not torch.equal(WAYS[way](rows, True), WAYS[way](rows, False)), "it would have dropped something"
