"""Interleaved 1F1B: every rank holds several chunks, so a pipe fills in a fraction of a stage's time.

Microbatches go through the chunks in groups of at least as many as there are ranks: the first group through chunk 0 of
all ranks, then through chunk 1, and so on; backwards through the chunks in reverse. Where the ranks don't divide the
microbatches, the groups are a little larger, and as equal as they can be.

    shardwise schedule interleaved --stages 2 --microbatches 4

    rank 0  F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
    rank 1  .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .
"""

from itertools import pairwise

from shardwise.schedule.instruction import Instruction, backward, forward
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    groups = _groups(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        forwards = [
            forward(chunk * num_ranks + rank, microbatch)
            for group in groups
            for chunk in range(num_chunks)
            for microbatch in group
        ]
        backwards = [
            backward(chunk * num_ranks + rank, microbatch)
            for group in groups
            for chunk in reversed(range(num_chunks))
            for microbatch in group
        ]
        # The first backward comes back when the first group has passed all chunks but one, and the last of those the
        # ranks below; a rank is two steps further from it for each rank between.
        num_ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * max(map(len, groups))
        orders.append(_alternate(forwards, backwards, num_ahead))
    return Schedule.of("interleaved", loop(num_ranks, num_chunks), num_microbatches, orders)


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Cut the microbatches into as many runs of at least `num_ranks` as there can be."""
    num_groups = max(1, num_microbatches // num_ranks)
    edges = [-(-num_microbatches * group // num_groups) for group in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _alternate(forwards: list[Instruction], backwards: list[Instruction], num_ahead: int) -> list[Instruction]:
    order = forwards[:num_ahead]
    for ahead, back in zip(forwards[num_ahead:], backwards, strict=False):
        order += [ahead, back]
    return order + backwards[max(0, len(forwards) - num_ahead) :]
