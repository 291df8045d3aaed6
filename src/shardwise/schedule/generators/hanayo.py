"""Hanayo: stages laid down the ranks and up again in waves, so that pipes meet without holding the model twice.

More waves mean smaller stages and a smaller bubble, for as many more transfers. Each rank takes a backward whenever one
is there, the shallowest first, and else the deepest forward; it holds no more than a pipe of 1F1B.

    shardwise schedule hanayo --stages 2 --microbatches 2

    time 0 to 3.5
    rank 0  0F0 0F1 .   3F0 4F0 3F1 4F1 7F0 7B0---- 7F1 7B1---- .
    rank 1  .   1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 .   6B0---- 5B0----

    time 3.5 to 7
    rank 0  4B0---- 3B0---- 4B1---- 3B1---- 0B0---- .   .   0B1----
    rank 1  6B1---- 5B1---- 2B0---- 1B0---- 2B1---- 1B1---- .   .
"""

from shardwise.schedule.instruction import Kind
from shardwise.schedule.packing import Policy, pack
from shardwise.schedule.placement import wave
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.schedule import Schedule


def hanayo(num_ranks: int, num_microbatches: int, num_chunks: int = 4) -> Schedule:
    placement = wave(num_ranks, num_chunks // 2)
    # A backward is twice a forward, and whole: as if its weight gradient took no time and held nothing.
    times = StageTimes(forward=1.0, input_gradient=2.0, weight_gradient=0.0)
    prices = stage_prices(placement, [times] * num_ranks, kept_for_weights=0.0)
    policy = Policy(deepest_backward_first=False)
    packed = pack(placement, num_microbatches, prices, (float(num_ranks),) * num_ranks, policy)
    assert packed is not None, "a packing that follows no order cannot lock up"
    orders = [
        [each._replace(kind=Kind.B) if each.kind is Kind.I else each for each in order if each.kind is not Kind.W]
        for order in packed.orders
    ]
    return Schedule.of("hanayo", placement, num_microbatches, orders)
