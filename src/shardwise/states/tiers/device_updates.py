"""Updates at the device, of state on the host that visits it: `host_states.py`, with an optimizer that nobody else has.

A parameter of full precision stays where it is, and what an optimizer keeps of it comes and goes. Of one of less, a
master comes along. For Adam that is 8 or 12 bytes a number each way, where cores would have to read and write 28; and
as the device updates it, the numbers are the device's own, to the last bit.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.host_memory import number_bytes_of
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.residency import Handed, Master
from shardwise.states.tiers.staging import lay_out, size_of
from shardwise.states.tiers.update_bucket import Bucket, MakeOptimizer


class AtDevice:
    """Buckets whose state is on the host, with masters where they are of less than full precision."""

    def __init__(
        self, buckets: Sequence[Bucket], make_optimizer: MakeOptimizer, crossing: Crossing, visiting_bytes: int
    ) -> None:
        residents = [resident for each in buckets for resident in residents_of(each, crossing)]
        self._residents = {each.parameter: each for each in residents}
        master_bytes = max(each.weight.element_size() if isinstance(each, Master) else 0 for each in residents)
        number_bytes = number_bytes_of(make_optimizer, list(self._residents)) + master_bytes
        self._states = HostStates(
            {make_optimizer([each.weight for each in residents]): number_bytes},
            1.0,
            crossing,
            residents={each.weight: each for each in residents},
            visiting_bytes=visiting_bytes,
            paced=True,
        )
        self._states.begin()

    @property
    def error(self) -> BaseException | None:
        """What went wrong beside the caller, if anything did."""
        return self._states.error

    def update(self, bucket: Bucket, scale: float | None, rate: float | None) -> None:
        """Have a bucket updated that has its gradients. They are its parameters' no more."""
        residents = [self._residents[each] for each in bucket.parameters]
        weights = [each.weight for each in residents]
        self._states.settle(weights)
        for each, gradient in zip(residents, bucket.take(), strict=True):
            each.take(gradient, scale)
        self._states.rate = rate
        self._states.ready(weights)

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """What is computed from now on comes after the updates of some buckets."""
        self._states.follow([self._residents[each].weight for bucket in buckets for each in bucket.parameters])

    def end_step(self) -> None:
        """All gradients of a step were given: the first states come for the next."""
        self._states.step()
        self._states.begin()

    def wait(self) -> None:
        """Wait until all that was asked for is updated, and at home."""
        self._states.wait()

    def close(self) -> None:
        """End the threads, and give the device's memory back."""
        self._states.close()


def residents_of(bucket: Bucket, crossing: Crossing) -> list[Handed]:
    """How the parameters of a bucket come to be updated."""
    low = [each for each in bucket.parameters if each.element_size() < torch.float32.itemsize]
    likes = {each: torch.empty(each.shape, dtype=torch.float32, device="meta") for each in low}
    homes: dict[nn.Parameter, Tensor] = {}
    if likes:
        memory = crossing.pinned((size_of(likes.values()),), torch.uint8)
        homes = dict(zip(likes, lay_out(memory, likes.values()), strict=True))
    for parameter, home in homes.items():
        home.copy_(parameter.detach())
    return [
        Master(nn.Parameter(homes[each]), each) if each in homes else Handed(each, each) for each in bucket.parameters
    ]
