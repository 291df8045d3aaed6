"""Metrics as sums and their numbers."""

import torch

from shardwise.stages.metrics import pairs_of


def test_a_metric_is_what_it_was_when_it_was_measured() -> None:
    """It is read when the step is over: a counter of the module's own has gone on by then."""
    seen, number = torch.tensor(3.0), torch.tensor(2)
    found = pairs_of({"seen": (seen, number), "mean": seen})
    seen += 5
    number += 1
    assert [[float(each) for each in found[name]] for name in ("seen", "mean")] == [[3, 2], [3, 1]]
