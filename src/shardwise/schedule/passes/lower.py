"""All that a plain training step needs, in the order in which the passes must run."""

from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.steps import insert_steps
from shardwise.schedule.schedule import Schedule


def lower(schedule: Schedule) -> Schedule:
    """Return a compute-only schedule with its steps and its transfers, ready to run."""
    return insert_steps(insert_communication(schedule))
