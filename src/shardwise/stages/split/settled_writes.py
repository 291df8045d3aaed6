"""Find parameters that the first forward writes and later ones leave unchanged, such as clamped weights."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from shardwise.stages.rows import RowRule, take_rows
from shardwise.stages.split.arguments import Signature
from shardwise.stages.stage import Batch


def settled(module: nn.Module, signature: Signature, example: Batch, names: Collection[str]) -> frozenset[str]:
    """Return those of these parameters that more forwards, of the example and of one of its rows, do not change.

    Assumes that a forward of the example has been run. Recomputation writes to such parameters again without effect.
    """

    def value_of(name: str) -> Tensor:
        return module.get_parameter(name).detach()

    left = {name: value_of(name).clone() for name in names}
    seen = RowRule(signature.names).look(example)
    if not left or seen.length < 2:
        return frozenset()
    try:
        for rows in (example, take_rows(example, seen, 0, 1)):
            args, kwargs = signature.arguments(rows)
            module(*args, **kwargs)
    except Exception:  # The module cannot run on one row.
        return frozenset()
    return frozenset(name for name, each in left.items() if torch.equal(value_of(name), each))
