"""Settings of torch for small matrices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_matrices() -> Iterator[None]:
    """Compute without oneDNN: it takes 0.6 ms for any matrix, however small (aarch64, torch 2.13)."""
    before = bool(torch.backends.mkldnn.enabled)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]
