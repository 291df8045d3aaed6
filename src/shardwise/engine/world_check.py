"""Check a module or a loss that uses `torch.distributed`: its rank, the world size, or values of other ranks.

Code for DDP combines the losses of ranks so: `loss * dist.get_world_size()`, or embeddings gathered from all ranks as
negatives. Under a plan, ranks may have the same rows, parts of a layer or other layers; and the result must be that of
one process. So if the code contains such names, module and loss are run twice: as they are, and as if there were only
one process. Both results must be the same.

That is so too of a sum over ranks, `all_reduce(number) / world`, as long as all have the same rows; replicas have not.
So what ranks tell each other is changed, and the result must be the same still.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.engine.options import Options
from shardwise.environment import without_ranks
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.no_collectives import ChangedCollectives, SeenCollectives
from shardwise.stages.rows import RowRule
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import steady_for
from shardwise.stages.trial_rows import three_rows, two_and_one
from shardwise.stages.trial_run import Run, Trial

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
    asking = _Asking(module, plan, loss, example, rule, options)
    told = wires.gather((asking.find(), asking.have_talked))
    if plan.dp * plan.cp > 1 and any(have_talked for _, have_talked in told):
        told += wires.gather(((asking.find_dependent(), True), True))
    problem = next((each for (each, _), _ in told if each is not None), None)
    if problem is not None:
        raise ShardwiseError(problem, remedy=_REMEDY)
    return all(can for (_, can), _ in told)


class _Asking:
    """Runs two rows of an example, among other ranks and alone."""

    def __init__(
        self, module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options
    ) -> None:
        precision = options.precision_of(plan, example)
        self._module, self._plan, self._example, self._rule = module, plan, example, rule
        self._trial = Trial(module, loss, precision)
        self._among: Run | None = None
        #: Whether a collective was begun.
        self.have_talked = False

    def find(self) -> tuple[str | None, bool]:
        """Return the problem, if any, and whether the code runs without other ranks."""
        seen = SeenCollectives()
        try:
            among = self._run(seen)
        except Exception:  # If something is wrong, the run of the whole example will report it.
            return None, False
        self._among, self.have_talked = among, seen.are_there
        if seen.are_there and self._plan.pp > 1:
            return (
                "the forward or the loss talks to other ranks by torch.distributed, and under"
                f" pp={self._plan.pp} these are at other stages then: they would wait for each other"
            ), False
        try:
            with as_if_alone():
                by_itself = self._run(SeenCollectives())
        except Exception:  # It does not run in one process alone.
            return None, False
        if _are_equal(among, by_itself):
            return None, True
        return (
            f"the forward or the loss asks torch.distributed for ranks, and computes something else for them: the loss"
            f" of two rows is {among.total:.6g}, and {by_itself.total:.6g} in one process alone"
        ), True

    def find_dependent(self) -> str | None:
        """Return the problem if the result depends on what other ranks tell. All ranks call this alike."""
        try:
            changed = self._run(ChangedCollectives())  # type: ignore[no-untyped-call]
        except Exception:  # Something else is told than what it can do with.
            return None
        if self._among is None or _are_equal(self._among, changed):
            return None
        return (
            "the forward or the loss combines numbers of all ranks (all_reduce, all_gather), and the result depends on"
            f" them: under {self._plan} other ranks have other rows, so the loss would not be that of the whole batch"
        )

    def _run(self, within: Any) -> Run:
        @contextmanager
        def steadily() -> Iterator[None]:
            with steady_for(self._module), within:
                yield

        look = self._rule.look(self._example)
        rows = two_and_one(three_rows(self._example, look), look)[0]
        return self._trial.run(rows, training=True, within=steadily)


def _are_equal(one: Run, other: Run) -> bool:
    pairs = [(one.total, other.total), (one.number or 0.0, other.number or 0.0)]
    return all(abs(first - second) <= one.tolerance * max(abs(second), 1e-12) for first, second in pairs)


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
