"""Shardwise makes many GPUs work as one larger GPU.

The public names are here, and each is loaded when it is first used: `import shardwise` is quick and loads neither torch
nor numpy, so that a command, an editor or a login node can ask small questions cheaply.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.engine.parallelize import parallelize as parallelize
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.placing.place import place as place
    from shardwise.planner.plan import Plan as Plan
    from shardwise.planner.planning import plan as plan
    from shardwise.ranks.replica import replica_of as replica_of
    from shardwise.ranks.spawn import spawn as spawn
    from shardwise.schedule.catalogue import make_schedule as make_schedule
    from shardwise.schedule.instruction import Instruction as Instruction
    from shardwise.schedule.placement import Placement as Placement
    from shardwise.schedule.prices import Prices as Prices
    from shardwise.schedule.schedule import Schedule as Schedule
    from shardwise.schedule.simulate import simulate as simulate
    from shardwise.schedule.verify import verify as verify
    from shardwise.stages.rows import rows as rows
    from shardwise.stages.rows import whole as whole
    from shardwise.states.compact_adamw import CompactAdamW as CompactAdamW
    from shardwise.states.muon import Muon as Muon
    from shardwise.states.parameter_group import Share as Share
    from shardwise.states.parameter_group import is_hidden_matrix as is_hidden_matrix
    from shardwise.trace.events import Trace as Trace

__version__ = "0.1.0"

# Where each public name lives. The imports above say the same to type checkers (`as`: they are given on), and a test
# holds the two together.
_HOMES = {
    "CompactAdamW": "shardwise.states.compact_adamw",
    "Instruction": "shardwise.schedule.instruction",
    "Muon": "shardwise.states.muon",
    "Placement": "shardwise.schedule.placement",
    "Plan": "shardwise.planner.plan",
    "Prices": "shardwise.schedule.prices",
    "Schedule": "shardwise.schedule.schedule",
    "ShardwiseError": "shardwise.errors",
    "Share": "shardwise.states.parameter_group",
    "Trace": "shardwise.trace.events",
    "is_hidden_matrix": "shardwise.states.parameter_group",
    "make_schedule": "shardwise.schedule.catalogue",
    "parallelize": "shardwise.engine.parallelize",
    "place": "shardwise.placing.place",
    "plan": "shardwise.planner.planning",
    "replica_of": "shardwise.ranks.replica",
    "rows": "shardwise.stages.rows",
    "simulate": "shardwise.schedule.simulate",
    "spawn": "shardwise.ranks.spawn",
    "verify": "shardwise.schedule.verify",
    "whole": "shardwise.stages.rows",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # Seeing this function, a type checker would take any misspelt name for a public one.

    def __getattr__(name: str) -> object:
        """Load a public name's home and keep the name here, so that this is asked once for each."""
        if name not in _HOMES:
            raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
