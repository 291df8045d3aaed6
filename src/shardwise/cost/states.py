"""Parameters on a rank, by the place of its stage."""

from typing import NamedTuple

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.stage import Deal
from shardwise.model.model import Model
from shardwise.model.share import Share

#: Where a rank's stage stands: ends differ by embedding and head.
PLACES = ("first", "middle", "last")


class Counts(NamedTuple):
    """Parameters before ZeRO: of a rank on each place (candidates x places), of one layer, of both ends."""

    dense: Floats
    expert: Floats
    layer: Floats
    ends: Floats


def count_blocks(model: Model, layouts: Layouts, dealt: Deal) -> Counts:
    """Parameters that a rank holds on each place."""
    share = Share(tp=layouts.tp, ep=layouts.ep, cp=layouts.cp)
    zero = np.zeros(len(layouts))
    layers = [(block, count) for block, count in model.kinds if block.stack]
    num_layers = sum(count for _, count in layers)
    dense, expert = zero, zero
    for block, count in layers:
        experts = zero + block.num_expert_parameters_on(share)
        dense = dense + (block.num_parameters_on(share) - experts) * (count / num_layers)
        expert = expert + experts * (count / num_layers)
    first = next((index for index, block in enumerate(model.blocks) if block.stack), 0)
    begin = sum((zero + block.num_parameters_on(share) for block in model.blocks[:first]), zero)
    end = sum((zero + block.num_parameters_on(share) for block in model.blocks[first:] if not block.stack), zero)
    alone = layouts.pp == 1
    # A head that is tied to the embedding is one tensor where both are on one rank.
    tied = begin if model.ties else zero
    both = begin + np.where(alone, np.maximum(end - tied, 0.0), 0.0)
    held = np.stack([dealt.first + dealt.extra, dealt.middle + dealt.extra, dealt.last], axis=1)
    held = np.where(alone[:, None], num_layers, held)
    outside = np.stack([both, np.where(alone, both, 0.0), np.where(alone, both, end)], axis=1)
    return Counts(held * dense[:, None] + outside, held * expert[:, None], dense + expert, begin + end)
