"""Replace `torch.utils.checkpoint(..., use_reentrant=True)` while an engine or a trial runs.

The older (reentrant) kind runs its forward without a graph. Its backward runs the forward again, and another backward
nested in the outer one:

    older    F without a graph          B [ F  B ]     its units are not seen in F; gradients come in the inner B
    newer    F, saves its inputs        [ F ] B        one graph, one backward

With the older kind, zero 3 does not learn in time that its weights are needed again, values between stages are no
longer leaves, and the backward cannot be split. The newer kind computes the same gradients, so it is run instead.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint


class _NotRecomputed:
    """Runs a checkpointed function without recomputation."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        with torch.set_grad_enabled(_has_gradients(args)):
            return function(*args)


class _Newer:
    """Checkpoints with the newer (non-reentrant) kind."""

    @staticmethod
    def apply(function: Callable[..., Any], keeps_draws: bool, *args: Any) -> Any:
        if not _has_gradients(args):
            return _NotRecomputed.apply(function, keeps_draws, *args)
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keeps_draws)


def _has_gradients(args: tuple[Any, ...]) -> bool:
    """Whether the output of the older kind requires a gradient: only if one of its arguments does."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)


class _InPlace:
    """Replaces torch's class by another, process-wide, while any thread is inside."""

    def __init__(self, instead: type) -> None:
        self._instead, self._lock, self._num_inside = instead, threading.Lock(), 0
        self._before: Any = None

    @contextmanager
    def standing(self) -> Iterator[None]:
        with self._lock:
            if self._num_inside == 0:
                self._before, checkpoint.CheckpointFunction = checkpoint.CheckpointFunction, self._instead  # type: ignore[misc, assignment]
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    checkpoint.CheckpointFunction = self._before  # type: ignore[misc]


_NEWER, _NONE = _InPlace(_Newer), _InPlace(_NotRecomputed)

#: A context in which checkpoints of the older kind become the newer kind.
in_the_newer_way = _NEWER.standing
#: A context in which they are not recomputed at all: they do not support `autograd.grad`.
nothing_recomputed = _NONE.standing
