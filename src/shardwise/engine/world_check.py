"""Check a module or a loss that uses `torch.distributed`: its rank, the world size, or values of other ranks.

Code for DDP combines the losses of ranks so: `loss * dist.get_world_size()`, or embeddings gathered from all ranks as
negatives. Under a plan, ranks may have the same rows, parts of a layer or other layers; and the result must be that of
one process. So if the code contains such names, module and loss are run twice: as they are, and as if there were only
one process. Both results must be the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.engine.options import Options
from shardwise.environment import without_ranks
from shardwise.errors import ShardwiseError
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.batch import home_of
from shardwise.stages.no_collectives import SeenCollectives
from shardwise.stages.rows import RowRule
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import steady_for
from shardwise.stages.trial_rows import three_rows, two_and_one
from shardwise.stages.trial_run import Trial

#: The names by which code asks.
_ASKING = frozenset(
    {
        "get_rank", "get_world_size", "get_node_local_rank", "is_initialized", "is_torchelastic_launched", "environ",
        "getenv", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce",
        "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
    }
)  # fmt: skip
_REMEDY = (
    "leave ranks to the plan: a mean or a sum over rows is told of all parts, return total, number says what it is"
    " over, and engine.metrics has what is logged"
)


def check_world(
    module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options, wires: Wires
) -> bool:
    """Refuse code whose result depends on the presence of other ranks. All ranks call this alike.

    Return whether the code uses `torch.distributed` and also runs without it: then trials run as if alone. Ranks may
    differ in their logging, for example, and would deadlock in trials that depend on other ranks.
    """
    if wires.watch is None or not options.verify or any(each.is_meta for each in module.parameters()):
        return False
    if not _ASKING & PythonState(module, loss).named:
        return False
    told = wires.gather(_found(module, plan, loss, example, rule, options))
    problem = next((each for each, _ in told if each is not None), None)
    if problem is not None:
        raise ShardwiseError(problem, remedy=_REMEDY)
    return all(can for _, can in told)


def _found(
    module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options
) -> tuple[str | None, bool]:
    """Return the problem, if any, and whether the code runs without other ranks."""
    precision = partial(ComputePolicy.of(plan, casts=options.masters).precision, home_of(example))
    trial, seen = Trial(module, loss, precision), SeenCollectives()

    def run(within: Any) -> Any:
        @contextmanager
        def steadily() -> Iterator[None]:
            with steady_for(module), within:
                yield

        return trial.run(rows, training=True, within=steadily)

    try:
        look = rule.look(example)
        rows = two_and_one(three_rows(example, look), look)[0]
        among = run(seen)
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return None, False
    if seen.are_there and plan.pp > 1:
        return (
            "the forward or the loss talks to other ranks by torch.distributed, and under"
            f" pp={plan.pp} these are at other stages then: they would wait for each other"
        ), False
    try:
        with as_if_alone():
            by_itself = run(SeenCollectives())
    except Exception:  # It does not run in one process alone.
        return None, False
    pairs = [(among.total, by_itself.total), (among.number or 0.0, by_itself.number or 0.0)]
    if all(abs(one - other) <= among.tolerance * max(abs(other), 1e-12) for one, other in pairs):
        return None, True
    return (
        f"the forward or the loss asks torch.distributed for ranks, and computes something else for them: the loss of"
        f" two rows is {among.total:.6g}, and {by_itself.total:.6g} in one process alone"
    ), True


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Let `torch.distributed` report one process, and no group of several, within this context."""
    group = dist.group.WORLD
    dist.group.WORLD = None
    try:
        with without_ranks():
            yield
    finally:
        dist.group.WORLD = group
