"""All passes of a training step, in the order in which they must run."""

from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.sharding import insert_gathers
from shardwise.schedule.passes.steps import insert_steps
from shardwise.schedule.schedule import Schedule


def lower(schedule: Schedule, *, reduce_gradients: bool = False, max_gathered: int | None = None) -> Schedule:
    """Return a compute-only schedule with its steps and its transfers, ready to run.

    With `reduce_gradients`, every stage reduces its gradients over its replicas. With `max_gathered`, sharded weights
    are gathered, for at most that many stages of a rank at a time.
    """
    lowered = insert_steps(insert_communication(schedule), reduce_gradients=reduce_gradients)
    return lowered if max_gathered is None else insert_gathers(lowered, max_gathered=max_gathered)
