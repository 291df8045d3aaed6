"""What was played, put together as a trace: column by column, for a million calls of anything take a good part of a
second."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from shardwise.schedule.instruction import Instruction, Kind, text_of
from shardwise.schedule.needs import Needs
from shardwise.schedule.prices import Prices
from shardwise.trace.events import Event, Lane, Trace


def trace_of(
    needs: Needs,
    prices: Prices,
    *,
    lanes: Sequence[Lane],
    starts: Sequence[float],
    ends: Sequence[float | None],
    after: Sequence[int | None],
) -> Trace:
    """The trace of all nodes: on which lane each ran, from when to when, and which node let it start."""
    nodes, schedule = needs.nodes, needs.schedule
    unfinished = [node for node, end in enumerate(ends) if end is None]
    assert not unfinished, f"{nodes[unfinished[0]]} never ended"
    held = list(map(prices.held, nodes))
    columns = (
        _texts(needs),
        needs.rank,
        lanes,
        starts,
        ends,
        [instruction.stage for instruction in nodes],
        [instruction.microbatch for instruction in nodes],
        [at_start for at_start, _ in held],
        [at_end for _, at_end in held],
        after,
        _peer_ranks(needs),
    )
    # What `Event._make` does, without a call in Python for each: it takes a quarter less.
    events = tuple(map(partial(tuple.__new__, Event), zip(*columns, strict=True)))
    return Trace(name=schedule.name, num_ranks=schedule.num_ranks, events=events)


def _texts(needs: Needs) -> list[str]:
    """The text of each node. Nodes that are alike but for their microbatch share all the rest of it."""
    texts = [""] * len(needs.nodes)
    for (kind, stage, peer), (nodes, microbatches) in needs.alike.items():
        head = f"{stage}{kind}"
        tail = text_of(Instruction(kind, stage, 0, peer)).removeprefix(f"{head}0")
        for node, microbatch in zip(nodes, microbatches, strict=True):
            texts[node] = f"{head}{microbatch}{tail}"
    for node in chain.from_iterable(pairs.nodes for pairs in needs.beside.values()):
        texts[node] = text_of(needs.nodes[node])
    return texts


def _peer_ranks(needs: Needs) -> list[int | None]:
    """For each node that sends or receives, the other rank."""
    ranks: list[int | None] = [None] * len(needs.nodes)
    for (kind, _, peer), (nodes, _) in needs.alike.items():
        if peer is not None and kind is not Kind.REDUCE:
            rank = needs.schedule.placement.ranks[peer]
            for node in nodes:
                ranks[node] = rank
    return ranks
