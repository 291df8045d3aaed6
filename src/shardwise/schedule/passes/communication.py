"""Writes out the transfers: a SEND behind every value that another rank reads, a RECV where it is posted.

    rank 0   F0 SEND_F0>1 F1 SEND_F1>1                  B0 ...
    rank 1   RECV_F0<0 RECV_F1<0 F0 B0 SEND_B0>0 F1 ...

A SEND stands directly behind what it sends. A RECV stands as late as it may without ever being late: directly behind
the last computation of its own rank that the sender must have waited for. Before that the sender cannot be ready,
whatever the times; after that it might be, and the transfer would wait for its receive. So receives are early, and
no more of them are open than the sender can run ahead.
"""

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule


def insert_communication(schedule: Schedule) -> Schedule:
    """Return the schedule with its sends and receives. One that has them already comes back as it is."""
    if schedule.communicates or schedule.num_ranks == 1:
        return schedule
    needs = Needs(schedule)
    known = _latest_known(needs)
    ranks = schedule.placement.ranks
    # For each node, the instructions to put behind it; for each rank, those to put before everything.
    behind: dict[int, list[Instruction]] = {}
    first: list[list[Instruction]] = [[] for _ in schedule.orders]
    receives: list[tuple[int, int, int, Instruction]] = []
    for node, instruction in enumerate(needs.nodes):
        for send, receive in _transfers(instruction, schedule):
            behind.setdefault(node, []).append(send)
            target = ranks[receive.stage]
            receives.append((target, known[node][target], node, receive))
    # Two receives of one link stand in the order of their sends: what a sender has waited for only grows.
    for target, place, _, receive in sorted(receives, key=lambda entry: entry[:3]):
        if place < 0:
            first[target].append(receive)
        else:
            behind.setdefault(needs.first_node[target] + place, []).append(receive)
    orders = []
    for rank, order in enumerate(schedule.orders):
        out = list(first[rank])
        for position, instruction in enumerate(order):
            out.append(instruction)
            out.extend(behind.get(needs.first_node[rank] + position, ()))
        orders.append(out)
    return schedule.with_orders(orders)


def _transfers(instruction: Instruction, schedule: Schedule) -> list[tuple[Instruction, Instruction]]:
    """The sends that an instruction's results call for, each with its receive."""
    placement = schedule.placement
    found = []
    for kind, stage, microbatch, _, _ in instruction.parts:
        if kind is Kind.F:
            send, receive, readers = Kind.SEND_F, Kind.RECV_F, placement.targets[stage]
        elif kind in (Kind.B, Kind.I):
            send, receive, readers = Kind.SEND_B, Kind.RECV_B, placement.sources[stage]
        else:
            continue
        found += [
            (Instruction(send, stage, microbatch, reader), Instruction(receive, reader, microbatch, stage))
            for reader in readers
            if placement.ranks[reader] != placement.ranks[stage]
        ]
    return found


def _latest_known(needs: Needs) -> list[list[int]]:
    """For each node and each rank, the last position on that rank that has surely finished before the node ends.

    These are vector clocks: a node knows what its predecessor on its rank knew, and what each of its needs knew.
    """
    num_ranks = needs.schedule.num_ranks
    known: list[list[int] | None] = [None] * len(needs.nodes)
    position = [0] * num_ranks
    clocks = [[-1] * num_ranks for _ in range(num_ranks)]
    blocked: dict[int, list[int]] = {}
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        first = needs.first_node[rank]
        while position[rank] < len(needs.schedule.orders[rank]):
            node = first + position[rank]
            missing = next((need for need in needs.before[node] if known[need] is None), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            clock = clocks[rank]
            for need in needs.before[node]:
                other = known[need]
                if needs.rank[need] != rank and other is not None:
                    clock = list(map(max, clock, other))
            clock = clock.copy()
            clock[rank] = position[rank]
            known[node] = clocks[rank] = clock
            position[rank] += 1
            ready.extend(blocked.pop(node, ()))
    return [clock if clock is not None else [-1] * num_ranks for clock in known]
