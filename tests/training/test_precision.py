"""The factor of a half-precision loss: what it does to a loss, and that a run which goes on has the same."""

import pytest
import torch
from torch import Tensor

from shardwise.training import precision
from shardwise.training.precision import LossScale


@pytest.mark.parametrize("counts", [True, False])
def test_a_scaled_loss_has_the_same_mean_with_and_without_a_count(counts: bool) -> None:
    def plain(output: Tensor, _: object) -> Tensor | tuple[Tensor, int]:
        return (output.sum(), 4) if counts else output.mean()

    found = LossScale.of("fp16", plain).loss(torch.ones(4), {})
    assert isinstance(found, tuple)
    total, count = found
    assert float(total) / float(count) == 1.0
    assert float(count) == (4 if counts else 1) * precision._FIRST


def test_a_factor_that_goes_on_doubles_when_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_PATIENCE", 5)
    whole, parts = LossScale.of("fp16"), LossScale.of("fp16")
    for is_finite in (False, True, True, True):
        whole.note(is_finite=is_finite)
        parts.note(is_finite=is_finite)
    again = LossScale.of("fp16")
    again.take(parts.state())
    for _ in range(2):
        whole.note(is_finite=True)
        again.note(is_finite=True)
    assert again.factor == whole.factor == precision._FIRST
