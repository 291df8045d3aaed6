"""Evaluation mode, and back: a module may have a `train` or an `eval` of its own, which does more than torch's.

    eval()     merges an adapter into its weight          train()    takes it off again

So they are called as a script calls them. They run between steps: where weights have no memory then, a look at them is
refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from shardwise.errors import ShardwiseError

Context = Callable[[], AbstractContextManager[None]]


@contextmanager
def in_evaluation_mode(module: nn.Module, around: Context) -> Iterator[None]:
    """Let all of a module be in evaluation mode within the context. Its own code that sets modes runs `around`."""
    modes = [(each, each.training) for each in module.modules()]
    _set(module, module.eval, around)
    try:
        yield
    finally:
        if module.training is not modes[0][1]:
            _set(module, module.train, around)
        for each, training in modes:
            each.training = training


def _set(module: nn.Module, mode: Callable[[], nn.Module], around: Context) -> None:
    try:
        with around():
            mode()
    except Exception as error:
        raise ShardwiseError(
            f"{type(module).__name__}.{mode.__name__}() raises, as a module in it has a `train` of its own that reads"
            f" what this rank has not got between steps: {str(error).partition(chr(10))[0]}",
            remedy="what it does, in the forward; or a plan of dp with zero=2 or less",
        ) from error
