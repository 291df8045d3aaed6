"""Insert the transfers: a SEND after every value that another rank reads, a RECV where it is posted.

    rank 0   0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0RECV_B1<1 0B0 0B1
    rank 1   1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0

A SEND directly follows the computation of its value. A RECV is posted as late as possible without ever delaying a
transfer: directly after the last computation of its own rank that the sender must have waited for. Before that point
the sender cannot be ready, whatever the times; after it, the sender might be, and the transfer would wait for its
receive. So receives are early, and no more of them are open than the sender can run ahead.
"""

from collections import defaultdict

from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.instruction import COMPUTE, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.placement import Placement
from shardwise.schedule.schedule import Schedule

#: A transfer, without its microbatch: the kinds of its SEND and RECV, the stage that reads it, and that stage's rank.
Hop = tuple[Kind, Kind, int, int]


@collection_paused()
def insert_communication(schedule: Schedule) -> Schedule:
    """Return the schedule with its sends and receives. One that has them already comes back as it is."""
    if schedule.communicates or schedule.num_ranks == 1:
        return schedule
    needs = Needs(schedule)
    known, hops = _latest_known(needs), _hops(schedule.placement)
    # The sends after each node; for each rank, the receives after each position (-1: before the first instruction).
    sends: dict[int, list[Instruction]] = defaultdict(list)
    receives: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in schedule.orders]
    # Receives of one link are in the order of their sends, because a sender's vector clock only grows.
    for node, instruction in enumerate(needs.nodes):
        for kind, stage, microbatch, _, _ in instruction.parts:
            for send, receive, reader, target in hops.get((kind, stage), ()):
                sends[node].append(Instruction(send, stage, microbatch, reader))
                receives[target][known[node][target]].append(Instruction(receive, reader, microbatch, stage))
    orders = []
    for order, first, received in zip(schedule.orders, needs.first_node, receives, strict=True):
        out = list(received.get(-1, ()))
        for position, instruction in enumerate(order):
            out.append(instruction)
            out += sends.get(first + position, ())
            out += received.get(position, ())
        orders.append(out)
    return schedule.with_orders(orders)


def _hops(placement: Placement) -> dict[tuple[Kind, int], list[Hop]]:
    """Return the transfers that follow each kind of computation on each stage."""
    ranks, hops = placement.ranks, {}
    for stage, rank in enumerate(ranks):
        ahead = [reader for reader in placement.targets[stage] if ranks[reader] != rank]
        back = [reader for reader in placement.sources[stage] if ranks[reader] != rank]
        hops[Kind.F, stage] = [(Kind.SEND_F, Kind.RECV_F, reader, ranks[reader]) for reader in ahead]
        for kind in (Kind.B, Kind.I):
            hops[kind, stage] = [(Kind.SEND_B, Kind.RECV_B, reader, ranks[reader]) for reader in back]
    return hops


def _latest_known(needs: Needs) -> list[list[int]]:
    """Return, for each node and each rank, the last position on that rank that must have finished before the node ends.

    These are vector clocks: the clock of a node is the maximum of those of its predecessor on its rank and its needs.
    """
    num_ranks, orders = needs.schedule.num_ranks, needs.schedule.orders
    known: list[list[int]] = [[]] * len(needs.nodes)  # Empty until a node is reached.
    position = [0] * num_ranks
    clocks = [[-1] * num_ranks for _ in range(num_ranks)]
    blocked: dict[int, list[int]] = {}
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        first = needs.first_node[rank]
        while position[rank] < len(orders[rank]):
            node = first + position[rank]
            # A rank does not wait for instructions beside computation: it continues whether or not they have ended.
            before = needs.before[node] if needs.nodes[node].kind in COMPUTE else ()
            unknown = [need for need in before if not known[need]]
            if unknown:
                blocked.setdefault(unknown[0], []).append(rank)
                break
            clock = clocks[rank].copy()
            for other in [known[need] for need in before if needs.rank[need] != rank]:
                clock = [mine if mine > theirs else theirs for mine, theirs in zip(clock, other, strict=True)]
            clock[rank] = position[rank]
            known[node] = clocks[rank] = clock
            position[rank] += 1
            ready.extend(blocked.pop(node, ()))
    return [clock or [-1] * num_ranks for clock in known]
