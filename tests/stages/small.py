"""Settings for tests whose matrices are small."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.parity import problem


@contextmanager
def small_matrices() -> Iterator[None]:
    """One thread and no oneDNN, which takes longer and warns of CPUs without bf16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with problem.small_matrices():
            yield
    finally:
        torch.set_num_threads(threads)
