"""Redirect a loss to a copy of the module: it may read the module by itself, and not only what it is given.

    def loss(output, batch):
        return cross_entropy(output, batch["labels"]) + model.router.balance

A trial runs a copy. What the copy's forward has left is in the copy, so that is what the loss has to read there.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.stages.split.redirection import Redirection
from shardwise.stages.stage import Loss


def loss_of_copy(loss: Loss, module: nn.Module, twin: nn.Module) -> Loss:
    """Return the loss with its references to a module, and to all in it, redirected to a copy of that module.

    It is the loss itself if it has no such references.
    """
    memo = {id(each): other for each, other in _pairs(module, twin)}
    made: Loss = Redirection(memo).of(loss)
    return made


def _pairs(module: nn.Module, twin: nn.Module) -> Iterator[tuple[Any, Any]]:
    for kind in ("named_modules", "named_parameters", "named_buffers"):
        others = dict(getattr(twin, kind)(remove_duplicate=False))
        for name, each in getattr(module, kind)(remove_duplicate=False):
            if name in others:
                yield each, others[name]
