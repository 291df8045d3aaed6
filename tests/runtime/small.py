"""Surroundings for tests whose matrices are small."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_matrices() -> Iterator[None]:
    """One thread and no oneDNN: that takes 0.6 ms for any matrix however small, and warns of CPUs without bf16.

    (Measured on aarch64 with torch 2.13.)
    """
    threads, onednn = torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
