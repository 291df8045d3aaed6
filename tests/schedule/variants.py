"""Every catalogued schedule in every form that the passes give it."""

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.passes.offload import insert_offloads
from shardwise.schedule.passes.sharding import insert_gathers
from shardwise.schedule.passes.steps import insert_steps
from shardwise.schedule.schedule import Schedule

#: Even stages, and enough microbatches: what every schedule can be made for.
SETTINGS = ((2, 4), (4, 8))
NAMES = tuple(CATALOGUE)


def variants(name: str, num_ranks: int, num_microbatches: int) -> dict[str, Schedule]:
    """Computation alone, and ready to run: plainly, replicated, with sharded parameters, with activations offloaded."""
    raw = make_schedule(name, num_ranks, num_microbatches)
    return {
        "raw": raw,
        "lowered": lower(raw),
        "replicated": insert_communication(insert_steps(raw, reduce_gradients=True)),
        "gathered": lower(insert_gathers(raw, max_gathered=2)),
        "offloaded": lower(insert_offloads(raw, which=lambda each: each.microbatch % 2 == 0)),
    }
