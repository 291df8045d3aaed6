"""One cut of a module that lies in different parts on the ranks.

Where to cut is decided by what units cost, and ranks of a mesh see different costs: one has more heads than another,
or more experts, or more tokens came to its experts. So they tell each other, and go by the mean.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.stages.split.flow import UnitCall


def agree_on_costs(calls: Sequence[UnitCall]) -> None:
    """Let all ranks have the same costs of the units that they have seen called. All call this alike."""
    told: list[tuple[list[str], list[list[float]]]] = [([], []) for _ in range(dist.get_world_size())]
    mine = [each.name for each in calls], [_costs_of(each) for each in calls]
    dist.all_gather_object(told, mine)
    first, _ = told[0]
    for rank, (names, _) in enumerate(told):
        if names != first:
            place = next((at for at, pair in enumerate(zip(first, names, strict=False)) if pair[0] != pair[1]), -1)
            raise ShardwiseError(
                f"on the example rank 0 calls {len(first)} units and rank {rank} calls {len(names)}, at first different"
                f" at {first[place]}: which units run depends on the data",
                remedy="decide inside a unit what to compute",
            )
    means = torch.tensor([costs for _, costs in told], dtype=torch.float64).mean(0)
    for call, mean in zip(calls, means.tolist(), strict=True):
        call.flops, call.bytes, call.weight_bytes, seconds = mean
        call.seconds = None if call.seconds is None else seconds


def _costs_of(call: UnitCall) -> list[float]:
    return [call.flops, call.bytes, call.weight_bytes, call.seconds or 0.0]
