"""The loss that a user gives: tried on the example before anything is trained, and weighed by rows if they differ."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from shardwise.errors import ShardwiseError, nearest
from shardwise.stages.batch import Padding, length_of
from shardwise.stages.metrics import pairs_of, take_metrics, with_metrics
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.stage import Batch, Loss


def trial_of(loss: Loss, batch: Batch) -> Callable[[Any], bool]:
    """What tries the loss on the module's output for this microbatch, and refuses one that cannot work.

    It says whether there are metrics beside it.
    """

    def attempt(output: Any) -> bool:
        try:
            result, metrics = take_metrics(loss(output, batch))
            if metrics is not None:
                pairs_of(metrics)
        except ShardwiseError:
            raise
        except Exception as error:
            raise ShardwiseError(
                f"the loss raises {type(error).__name__}: {error}, at {line_of_error(error)}; on the example it is"
                f" given {describe(output)}, and a batch with {', '.join(batch)}",
                remedy=_remedy(error, output, batch),
            ) from error
        total: Any = result[0] if isinstance(result, tuple) else result
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ShardwiseError(
                f"the loss is {describe(total)}, but it must be one number for a microbatch",
                remedy="return loss.sum(), loss.numel()",
            )
        return metrics is not None

    return attempt


def _remedy(error: Exception, output: Any, batch: Batch) -> str:
    """The name that was most likely meant, if it is a name that is missing."""
    wanted = error.name if isinstance(error, AttributeError) else error.args[0] if error.args else None
    entries: Iterable[Any] = output if isinstance(output, Mapping) else ()
    if isinstance(wanted, str) and isinstance(error, (AttributeError, KeyError)):
        for name, among in (("output", entries), ("batch", batch)):
            meant = nearest(wanted, [each for each in among if isinstance(each, str)])
            if meant is not None:
                return f"{name}[{meant!r}]"
    return "a loss(output, batch) of what the module returns and of what the batch has"


def summed_only(loss: Loss, cp: int) -> Loss:
    """The same loss, refused if it is a mean: ranks have different numbers of tokens that count."""

    def checked(output: Any, batch: Batch) -> Any:
        result, metrics = take_metrics(loss(output, batch))
        if not isinstance(result, tuple):
            raise ShardwiseError(
                f"the loss is a mean, and under cp={cp} a mean of means over parts of sequences is not the whole's",
                remedy="return the sum and the number that it is summed over: total, (labels != -100).sum()",
            )
        return with_metrics(result, None if metrics is None else pairs_of(metrics, cp=cp))

    return checked


def by_rows(loss: Loss) -> Loss:
    """The same loss where microbatches differ in size: a mean weighs as much as it has rows, padding nothing."""

    def weighed(output: Any, batch: Batch) -> Any:
        result, metrics = take_metrics(loss(output, batch))
        rows, is_padding = length_of(batch), isinstance(batch, Padding)
        total, number = result if isinstance(result, tuple) else (result * rows, rows)
        if metrics is not None:
            metrics = {} if is_padding else pairs_of(metrics, rows=rows)
        return with_metrics((total * 0, 0) if is_padding else (total, number), metrics)

    return weighed


def describe(output: Any) -> str:
    """An output in a few words, for an error."""
    kind = type(output).__name__
    if isinstance(output, Tensor):
        return f"a {kind} of shape {tuple(output.shape)}"
    return f"a {kind} with {', '.join(map(str, output))}" if isinstance(output, Mapping) else f"a {kind}"
