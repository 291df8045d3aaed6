"""Gradients of parameters that stages on several ranks share, summed over those stages.

What replicas share out is summed over replicas first, and over the stages at the step's end, shard by shard. What one
replica alone has (`local_gradients.py`) is summed as soon as this rank has its part: the others may come to it later.
"""

from collections.abc import Sequence

from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.tie_groups import Tie

# Channels of ties: these are numbered alike on ranks whose buckets are not.
_TIES, _BUCKETS_OF_A_TIE = 20_000, 64


class TieSums:
    """The ties of one rank, in the order that all ranks have them in."""

    def __init__(self, ties: Sequence[Tie], buckets: Sequence[Bucket], exchange: Exchange) -> None:
        self._ties, self._buckets, self._exchange = ties, buckets, exchange

    def is_counted(self, bucket: Bucket) -> bool:
        """Whether it is this rank that counts a bucket, where all are counted once."""
        return bucket.home.tie is None or self._ties[bucket.home.tie].is_counted_here

    def start(self, number: int, step: int) -> None:
        """Begin to sum what one replica alone has of a tie. A tie that is not of this rank's has nothing here."""
        tie = self._ties[number] if number < len(self._ties) else None
        for bucket in self._buckets if tie is not None and tie.group.size > 1 else ():
            if tie is not None and bucket.home.tie == number and bucket.local is not None:
                bucket.local.start_sum(tie.group, step)

    def finish_local(self, step: int) -> None:
        """Let gradients that stay where they are be those of a step."""
        for number in range(len(self._ties)):
            self.start(number, step)
        for bucket in self._buckets:
            if bucket.local is not None:
                bucket.local.start(step)
                bucket.local.finish(step)

    def sum_shards(self) -> None:
        """Sum what replicas share out."""
        under_way: list[Ticket] = []
        for number, tie in enumerate(self._ties):
            mine = [bucket for bucket in self._buckets if bucket.home.tie == number and bucket.local is None]
            assert len(mine) <= _BUCKETS_OF_A_TIE, f"tie {number} has {len(mine)} buckets"
            for place, bucket in enumerate(mine):
                channel = _TIES + number * _BUCKETS_OF_A_TIE + place
                under_way.append(self._exchange.sum_to_all(bucket.result, tie.group, channel))
        for ticket in under_way:
            ticket.wait()
