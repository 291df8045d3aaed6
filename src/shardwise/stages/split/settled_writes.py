"""Find parameters that the first forward writes and later ones leave unchanged, such as clamped weights."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.rows import RowRule, take_rows, tensors_in
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.stage import Batch

#: Two forwards that write the same, up to rounding.
_CLOSE = 1e-5


class WrittenAgain(NamedTuple):
    """Of the parameters that a forward writes, those that more forwards do not change; and those that each forward
    changes, so that the next one computes something else: a teacher that follows its student."""

    settled: frozenset[str] = frozenset()
    moving: frozenset[str] = frozenset()


def write_again(module: nn.Module, signature: Signature, example: Batch, names: Collection[str]) -> WrittenAgain:
    """Run more forwards, of the example and of one of its rows, and return what they do to these parameters.

    They are run with other weights too, as long as these are moved: a teacher may begin as a copy of its student, and
    then does not change. Assumes that whoever calls restores parameters.
    """
    if not names:
        return WrittenAgain()
    row = _one_row(signature, example)
    found = [_forwards(module, signature, example, row, names)]
    with moved_weights(module) as is_moved:
        if is_moved:
            found.append(_forwards(module, signature, example, row, names))
    told = [each for each in found if each is not None]
    if not told:
        return WrittenAgain()
    return WrittenAgain(
        settled=frozenset.intersection(*(each.settled for each in told)) if found[0] else frozenset(),
        moving=frozenset.union(*(each.moving for each in told)),
    )


def _one_row(signature: Signature, example: Batch) -> Batch | None:
    """Return a row of several; None if there is one, or if rows are not known.

    Then nothing is settled: other rows might write something else.
    """
    try:
        seen = RowRule(signature.names).look(example)
    except ShardwiseError:
        return None
    return take_rows(example, seen, 0, 1) if seen.length > 1 else None


def _forwards(
    module: nn.Module, signature: Signature, example: Batch, row: Batch | None, names: Collection[str]
) -> WrittenAgain | None:
    """Run them with the weights as they are; None if the module cannot run on one row, or with these weights."""

    def values() -> dict[str, Tensor]:
        return {name: module.get_parameter(name).detach().clone() for name in names}

    def run(rows: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
        seed_torch(0)
        args, kwargs = signature.arguments(rows)
        return [each.detach().clone() for each in tensors_in({"": module(*args, **kwargs)})], values()

    try:
        first, left = run(example)
        second, again = run(example)
        last = None if row is None else run(row)[1]
    except Exception:
        return None
    changed = frozenset(name for name in names if not _is_same(left[name], again[name]))
    is_same = all(_is_same(one, other) for one, other in zip(first, second, strict=False))
    return WrittenAgain(
        frozenset(n for n in names if last and torch.equal(left[n], again[n]) and torch.equal(again[n], last[n])),
        frozenset() if is_same else changed,
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * float(one.abs().max()), equal_nan=True)
