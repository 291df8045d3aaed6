"""Fingerprints of what a call returned: a few numbers to compare with another run, so that no activations are kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.stages.split.outline import has_numbers_elsewhere
from shardwise.torch_private import is_wrapped, pytree

#: About this many elements of a tensor are kept.
_SAMPLE = 1_024
#: The tolerance between two runs of the same computation, relative to the largest element.
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
_NEAR_IN_HALF = 2e-2


class _TensorPrint(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    sample: Tensor
    mean: Tensor | None


#: Of a tensor of ours without numbers of its own: a stage returns an ordinary one in its place.
_ELSEWHERE = object()
#: A `_TensorPrint` for each tensor, other leaves themselves, or None for what cannot be compared.
Print = Sequence[Any]


@torch.no_grad()
def print_of(returned: Any) -> Print:
    """Return the print of what a call returned."""
    return [_leaf(each) for each in pytree.tree_leaves(returned)]


def _leaf(each: Any) -> Any:
    if isinstance(each, (bool, int, float, str)):
        return each
    if has_numbers_elsewhere(each):
        return _ELSEWHERE
    if type(each) is not Tensor or each.layout is not torch.strided or each.is_meta or not each.numel():
        return None
    if is_wrapped(each):  # Its numbers are known inside `torch.func` alone.
        return None
    plain = torch.view_as_real(each) if each.is_complex() else each
    flat = plain.reshape(-1) if plain.is_contiguous() else plain.flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].clone()
    mean = flat.mean(dtype=torch.promote_types(flat.dtype, torch.float32)) if flat.is_floating_point() else None
    return _TensorPrint(tuple(each.shape), plain.dtype, sample, mean)


def far_apart(one: Print, other: Print | None) -> str | None:
    """Describe the difference between two prints; None if they are equal up to rounding."""
    if other is None or len(one) != len(other):
        return f"{len(one)} for {0 if other is None else len(other)} values"
    for mine, theirs in zip(one, other, strict=True):
        if mine is _ELSEWHERE or theirs is _ELSEWHERE:
            continue
        if type(mine) is not type(theirs):
            return f"{mine!r} for {theirs!r}"[:80]
        far = _distance(mine, theirs) if isinstance(mine, _TensorPrint) else _unlike(mine, theirs)
        if far is not None:
            return far
    return None


def _unlike(mine: Any, theirs: Any) -> str | None:
    if isinstance(mine, float) and abs(mine - theirs) <= 1e-4 * max(abs(mine), abs(theirs)):
        return None
    return None if mine == theirs or mine != mine else f"{mine!r} for {theirs!r}"


def _distance(mine: _TensorPrint, theirs: _TensorPrint) -> str | None:
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{list(mine.shape)} for {list(theirs.shape)}"
    near = 0.0 if not mine.dtype.is_floating_point else _NEAR.get(mine.dtype, _NEAR_IN_HALF)
    pairs = [(mine.sample, theirs.sample)]
    if mine.mean is not None and theirs.mean is not None:
        pairs.append((mine.mean, theirs.mean))
    largest = theirs.sample.double().abs().nan_to_num(0.0, 0.0, 0.0).max()
    for one, other in pairs:
        distance = (one.double() - other.double()).abs()
        # Two NaNs, or two equal infinities, have distance 0.
        distance = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, distance).max()
        if not bool(distance <= near * largest):
            return f"{float(distance):.3g}"
    return None
