"""What 16-bit forwards return, without their rounding."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from shardwise.stages.loss_kind import Tried
from shardwise.stages.loss_trial import try_loss
from shardwise.stages.rows import RowRule
from shardwise.stages.split.arguments import Signature
from shardwise.stages.unrounded import Unrounded


class _Balanced(nn.Module):
    """A router in bfloat16 whose rows are nearly alike at first, and the number that it returns beside its rows."""

    def __init__(self, *, of_each_row: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(6, 4, dtype=torch.bfloat16)
        nn.init.normal_(self.router.weight, std=0.05)
        self._of_each_row = of_each_row

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.router(x.bfloat16()).softmax(-1)
        balance = chosen.square().sum(-1).mean() if self._of_each_row else chosen.mean(0).square().sum()
        return chosen, 4 * balance


def _tried(module: nn.Module) -> Tried:
    def loss(output: tuple[Tensor, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        return mse_loss(output[0].float(), batch["y"]) + 0.02 * output[1].float()

    generator = torch.Generator().manual_seed(0)
    example = {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 4, generator=generator)}
    return try_loss(module, loss, example, RowRule(Signature(module).names), num_parts=2)


def test_a_balancing_number_of_rows_that_are_nearly_alike_is_no_mean_over_rows() -> None:
    assert "neither their mean by rows nor their sum" in str(_tried(_Balanced(of_each_row=False)).problem)


def test_a_mean_over_rows_in_16_bits_is_one() -> None:
    assert _tried(_Balanced(of_each_row=True)).problem is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_those_of_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers: Any = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(3, 6)
    with torch.no_grad(), Unrounded():  # type: ignore[no-untyped-call]
        found = layers(x.to(dtype))
    assert found.dtype == torch.float32
    # Weights are of 16 bits; nothing that is computed with them is rounded, and neither is what is cast.
    torch.testing.assert_close(found, layers.float()(x).detach())
