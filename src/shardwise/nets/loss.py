"""The loss of a language model, in the form that engines take: a sum, and the number that it is summed over."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.kernels.lazy_logits import LazyLogits
from shardwise.nets.transformer import Output

#: The label of tokens that do not count.
IGNORED = -100


def next_token_loss(output: Tensor | Output, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy with `batch["labels"]`, where a token's label is the next token, or -100.

    A balancing loss is added as if it were part of each label's loss.
    """
    labels: Tensor = batch["labels"]
    logits = output.logits if isinstance(output, Output) else output
    count = (labels != IGNORED).sum()
    # For lazy logits this is computed without them (`kernels/lazy_logits.py`).
    total = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return (total + output.auxiliary * count if isinstance(output, Output) else total), count


def has_lazy_logits(output: object) -> bool:
    """Whether the logits are computed by the loss, chunk by chunk."""
    return isinstance(getattr(output, "logits", output), LazyLogits)
