"""Forwards that need gradients: the example is run without any, as evaluations are, and torch does not say so."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ShardwiseError
from shardwise.stages.split.lines import line_of_error


@contextmanager
def without_gradients_explained() -> Iterator[None]:
    """Raise a clearer error than torch's if a forward fails because gradients are off."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in ("cannot register a hook", "can't retain_grad")):
            raise ShardwiseError(
                f"the forward hooks a gradient at {line_of_error(error)}, and the example is run without gradients, as"
                f" evaluations are: {error}",
                remedy="if hidden.requires_grad: before hidden.register_hook(...) or hidden.retain_grad()",
            ) from error
        if "does not require grad" in str(error):
            raise ShardwiseError(
                f"the forward asks for gradients, and the example is run without, as evaluations are: {error}",
                remedy="with torch.enable_grad(): around what torch.autograd.grad goes through",
            ) from error
        raise
