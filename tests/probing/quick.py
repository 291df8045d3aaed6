"""A probe with less time for each number: for tests of what becomes of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shardwise.probing import collectives, devices, kernels, links, meetings, split_backwards, split_layers, whole_steps

_LESS: list[tuple[Any, str, Any]] = [
    (collectives, "SIZES", (4096, 32768, 262144)),
    (collectives, "LIMIT_SECONDS", 0.01),
    (devices, "LIMIT_SECONDS", 0.02),
    (devices, "_CPU_COPIED", 2**22),
    (kernels, "LIMIT_SECONDS", 0.01),
    (kernels, "_ROWS", 1),
    (kernels, "_LEAST", 2),
    (kernels, "_PARAMETER", (64, 64)),
    (whole_steps, "LITTLE", whole_steps.Size(16, 1)),
    (whole_steps, "MUCH", (whole_steps.Size(16, 2),)),
    (split_backwards, "PAIRS", 1),
    (split_layers, "PASSES", 1),
    (split_layers, "_WIDTH", 16),
    (meetings, "_PIECES", 2),
    (meetings, "_TURNS", 1),
    (meetings, "_ROWS", 128),
    (links, "_SIZE_SECONDS", 0.02),
    (links, "_LARGEST", 2**22),
]


@contextmanager
def quickly() -> Iterator[None]:
    """Where probes of this process are quick."""
    with ExitStack() as stack:
        for module, name, value in _LESS:
            stack.enter_context(patch.object(module, name, value))
        yield
