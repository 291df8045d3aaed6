"""What of torch is set for a whole process, and must not outlive a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Settings(NamedTuple):
    """Those that change what is computed."""

    onednn: bool
    dtype: torch.dtype
    has_gradients: bool

    @staticmethod
    def now() -> "Settings":
        return Settings(bool(torch.backends.mkldnn.enabled), torch.get_default_dtype(), torch.is_grad_enabled())


@contextmanager
def settings_kept() -> Iterator[None]:
    """End with the settings, and with as many threads, as there were."""
    before, num_threads = Settings.now(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.backends.mkldnn.enabled = before.onednn  # type: ignore[assignment]
        torch.set_default_dtype(before.dtype)
        torch.set_grad_enabled(before.has_gradients)
