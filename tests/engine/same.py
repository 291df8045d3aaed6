"""Two modules that were trained alike are held against each other, bit for bit."""

import torch
from torch import nn


def assert_same(plain: nn.Module, placed: nn.Module) -> None:
    """Every parameter and its gradient."""
    for (name, one), (_, other) in zip(plain.named_parameters(), placed.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
