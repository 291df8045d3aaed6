"""Place experts by how often they were chosen, with their weights, gradients and optimizer state."""

from shardwise.engine.make_states import States
from shardwise.sharding.expert.load import Loads
from shardwise.sharding.expert.move import better_placements, count_moved
from shardwise.sharding.expert.sharding import ExpertSharding


def rebalance(experts: ExpertSharding | None, loads: Loads, states: States, gain: float) -> dict[str, int]:
    """Place experts by the load since the last call; return how many moved, by layer. All ranks call this alike."""
    if experts is None:
        return {}
    wanted = better_placements(experts, loads.since_placed(), gain)
    moved = count_moved(experts, wanted)
    states.module.place_experts(wanted, states.optimizers)
    states.begin_stream()
    loads.begin_anew()
    return moved
