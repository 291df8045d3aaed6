"""Parameters on a rank, by what stands there."""

from typing import NamedTuple

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.places import Places, ends_of, layer_kinds
from shardwise.model.model import Model
from shardwise.model.share import Share


class Counts(NamedTuple):
    """Parameters before ZeRO: of a rank on each place (candidates x places), of one layer, of both ends."""

    dense: Floats
    expert: Floats
    layer: Floats
    ends: Floats


def count_blocks(model: Model, layouts: Layouts, places: Places) -> Counts:
    """Parameters that a rank holds on each place."""
    some, kinds = layouts.distinct(("tp", "ep", "cp"))
    share = Share(tp=some.tp, ep=some.ep, cp=some.cp)
    zero = np.zeros(len(some))
    layers = layer_kinds(model)
    num_layers = max(sum(count for _, count in layers), 1)
    dense, expert, layer = np.zeros_like(places.begins), np.zeros_like(places.begins), zero
    for index, (block, count) in enumerate(layers):
        experts = zero + block.num_expert_parameters_on(share)
        others = zero + block.num_parameters_on(share) - experts
        dense = dense + places.layers[:, :, index] * others[kinds, None]
        expert = expert + places.layers[:, :, index] * experts[kinds, None]
        layer = layer + (others + experts) * (count / num_layers)
    before, after = ends_of(model)
    begin = sum((zero + block.num_parameters_on(share) for block in before), zero)
    end = sum((zero + block.num_parameters_on(share) for block in after), zero)
    # A head that is tied to the embedding is one tensor where both are on one rank.
    tied = np.minimum(begin, end) if model.ties else zero
    outside = places.begins * begin[kinds, None] + places.ends * end[kinds, None]
    outside = outside - places.begins * places.ends * tied[kinds, None]
    return Counts(dense + outside, expert, layer[kinds], (begin + end)[kinds])
