"""Metrics that are returned together with the loss of a microbatch.

    return loss, {"accuracy": hits.float().mean()}                           a mean over the microbatch
    return total, number, {"accuracy": (hits.sum(), hits.numel())}           a sum, and the number that it is over

A mean has the same weight for every microbatch, or is weighted by rows if their numbers differ. Sums and their numbers
are each added up over the whole batch, so every counted item has the same weight, however it is distributed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.stage import Batch

#: A sum, and the number that it is summed over.
Pair = tuple[Tensor | float, Tensor | float]
Pairs = Mapping[str, Pair]
#: Maps the module's output and the microbatch to metrics by name.
Metrics = Callable[[Any, Batch], Mapping[str, Any]]


def take_metrics(result: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """Split the result of a loss into the loss and its metrics; None if it has returned no metrics."""
    if not (isinstance(result, tuple) and len(result) > 1 and isinstance(result[-1], Mapping)):
        return result, None
    *rest, metrics = result
    return (rest[0] if len(rest) == 1 else tuple(rest)), metrics


def with_metrics(result: Any, metrics: Mapping[str, Any] | None) -> Any:
    """Add metrics to the result of a loss: the inverse of `take_metrics`."""
    if metrics is None:
        return result
    return (*result, metrics) if isinstance(result, tuple) else (result, metrics)


def pairs_of(metrics: Any, *, rows: int = 1, cp: int = 1) -> dict[str, Pair]:
    """Return every metric as a sum and its number, detached. A mean is weighted by `rows`.

    Under cp each rank has a part of the tokens, and a mean of means is not the whole's.
    """
    if not isinstance(metrics, Mapping):
        raise ShardwiseError(
            f"metrics are a {type(metrics).__name__}, and not numbers by name",
            remedy='{"accuracy": (hits.sum(), hits.numel())}',
        )
    found: dict[str, Pair] = {}
    for name, value in metrics.items():
        if not isinstance(value, tuple):
            if cp > 1:
                raise ShardwiseError(
                    f"the metric {name} is a mean, and under cp={cp} a mean of means over parts of sequences is not the"
                    " whole's",
                    remedy=f'{{"{name}": (its sum, the number that it is summed over)}}',
                )
            value = (value * rows, rows)
        if len(value) != 2 or not all(map(_is_number, value)):
            raise ShardwiseError(
                f"the metric {name} is {_described(metrics[name])}, and not one number, or a sum and its number",
                remedy=f'{{"{name}": (hits.sum(), hits.numel())}}; for whole outputs engine.predict(batch)',
            )
        # A copy: it is read after the step, when a counter of the module may have changed.
        found[str(name)] = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in value)  # type: ignore[assignment]
    return found


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (bool, int, float))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
