"""Layers distributed over the ranks of a pipeline: how many the first, a middle and the last rank have."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.cost.layouts import BALANCE, Layouts
from shardwise.cost.numbers import Floats, Number, choose
from shardwise.cost.pipeline import SCHEDULES

_LOOPED = [SCHEDULES.index(name) for name in ("interleaved", "looped-bfs")]
_ENDS, _WEIGHT, _RANKS, _SLOTS, _FRONT = map(BALANCE.index, ("ends", "weight", "ranks", "slots", "front"))


class Deal(NamedTuple):
    """Layers on the first, a middle and the last rank. `extra`: layers of the fullest rank beyond a middle one."""

    first: Floats
    middle: Floats
    last: Floats
    extra: Floats


def deal(num_layers: int, layouts: Layouts, begin: Number, end: Number) -> Deal:
    """Distribute layers over ranks. `begin` and `end` are the weights of embedding and head, in layers."""
    dealt = _shared(num_layers, layouts, begin, end)
    are_whole = are_dealt_whole(layouts)
    if are_whole.any():
        dealt = choose(are_whole, _whole(num_layers, layouts), dealt)
    alone = layouts.pp == 1
    return dealt._replace(first=np.where(alone, num_layers, dealt.first), extra=np.where(alone, 0.0, dealt.extra))


def are_dealt_whole(layouts: Layouts) -> np.ndarray:
    """Return which candidates distribute whole layers, so that the first rank has exactly `first` layers."""
    return np.isin(layouts.balance, (_SLOTS, _FRONT))


class Mixture(NamedTuple):
    """Layers of each kind on the first, a middle and the last rank: candidates x kinds. `layer`: the shares of the
    kinds in one average layer of a middle rank."""

    first: Floats
    middle: Floats
    last: Floats
    layer: Floats


def mix(order: Sequence[int], num_kinds: int, dealt: Deal) -> Mixture:
    """Return the kinds of the layers on each rank. `order` is the kind of each layer, from first to last.

    Ranks are assumed to hold consecutive layers: if a model begins with layers of another kind, the first rank has
    them. This also holds with several chunks, where they are in the first chunk.
    """
    seen = np.concatenate([np.zeros((1, num_kinds)), np.cumsum(np.eye(num_kinds)[list(order)], axis=0)])
    places, every = np.arange(len(seen)), seen[-1]
    first = np.stack([np.interp(dealt.first, places, column) for column in seen.T], axis=1)
    before = np.stack([np.interp(len(order) - dealt.last, places, column) for column in seen.T], axis=1)
    between = before - first
    # Two ranks have no middle rank between them, and a single rank has all layers.
    is_between = between.min(axis=1, keepdims=True) >= 0
    is_between &= between.sum(axis=1, keepdims=True) > 1e-9
    between = np.where(is_between, between, every)
    layer = between / np.maximum(between.sum(axis=1, keepdims=True), 1.0)
    return Mixture(first, layer * dealt.middle[:, None], every - before, layer)


def _shared(num_layers: int, layouts: Layouts, begin: Number, end: Number) -> Deal:
    """Distribute as evenly as possible, in fractions of layers: by number, or by weight of layers and both ends."""
    pp = layouts.pp.astype(np.float64)
    weigh, count = np.isin(layouts.balance, (_WEIGHT, _RANKS)), layouts.balance == _ENDS
    first_less = np.where(weigh, begin, np.where(count, 1.0, 0.0))
    last_less = np.where(weigh, end, np.where(count, 1.0, 0.0))
    slots = (num_layers + first_less + last_less) / pp
    first, last = np.maximum(slots - first_less, 0.0), np.maximum(slots - last_less, 0.0)
    middle = np.where(pp > 2, (num_layers - first - last) / np.maximum(pp - 2, 1), slots)
    pieces = np.where(layouts.balance == _RANKS, 1.0, layouts.chunks)
    fullest = np.ceil(middle / pieces - 1e-9) * pieces
    first, middle, last = _in_all_chunks(num_layers, layouts, first, middle, last)
    extra = np.where((pp <= 2) & weigh, 0.0, np.maximum(fullest - middle, 0.0))
    return Deal(first, middle, last, extra)


def _in_all_chunks(
    num_layers: int, layouts: Layouts, first: Floats, middle: Floats, last: Floats
) -> tuple[Floats, Floats, Floats]:
    """Give the first and the last rank a layer in each of their chunks, even if embedding or head weigh more than that.

    Other ranks have fewer then. Schedules with both ends on one rank are left as they are.
    """
    is_looped = (layouts.balance == _RANKS) & np.isin(layouts.schedule, _LOOPED)
    least = np.where(is_looped & (layouts.pp > 1), layouts.chunks, 0.0)
    more_first, more_last = np.maximum(least - first, 0.0), np.maximum(least - last, 0.0)
    alone = layouts.pp == 2
    first, last = first + more_first - more_last * alone, last + more_last - more_first * alone
    between = (num_layers - first - last) / np.maximum(layouts.pp - 2, 1)
    return first, np.where((more_first + more_last > 0) & (layouts.pp > 2), between, middle), last


def _whole(num_layers: int, layouts: Layouts) -> Deal:
    """Distribute whole layers, as two published programs do.

    `slots`: embedding, final norm and head count as one layer each, and the first ranks have one more if the number
    does not divide. `front`: every rank has as many as the fullest must have, and the last rank has the rest.
    """
    pp = layouts.pp.astype(np.float64)
    by_slots = layouts.balance == _SLOTS
    each, rest = np.divmod(num_layers + 3, pp)
    full = np.ceil(num_layers / pp)
    first = np.where(by_slots, np.maximum(each + (rest > 0) - 1, 0.0), full)
    last = np.maximum(np.where(by_slots, each - 2, num_layers - full * (pp - 1)), 0.0)
    fullest = np.where(by_slots, each + (rest > 1), full)
    middle = np.where(pp > 2, (num_layers - first - last) / np.maximum(pp - 2, 1), np.minimum(first, last))
    return Deal(first, middle, last, np.where(pp > 2, np.maximum(fullest - middle, 0.0), 0.0))
