"""The loss of a language model, in the form that engines take: a sum, and what it is summed over."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.kernels.lazy_logits import LazyLogits
from shardwise.nets.transformer import Output

#: A label that is not to be learned.
IGNORED = -100


def next_token_loss(output: Tensor | Output, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cross entropy with `batch["labels"]`, where a token's label is the token that follows it, or -100.

    A balancing loss weighs as if it were a part of each label's.
    """
    labels: Tensor = batch["labels"]
    logits = output.logits if isinstance(output, Output) else output
    count = (labels != IGNORED).sum()
    # Of logits that wait, this is computed without them (`kernels/lazy_logits.py`).
    total = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return (total + output.auxiliary * count if isinstance(output, Output) else total), count


def has_lazy_logits(output: object) -> bool:
    """Whether the logits are computed by the loss, chunk by chunk."""
    return isinstance(getattr(output, "logits", output), LazyLogits)
