"""What the loss of each part of a batch is weighed by: found out on every rank alike, before anything is cut."""

from functools import partial

from torch import nn

from shardwise.engine.prepare import Options
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.batch import home_of
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_trial import try_loss
from shardwise.stages.losses import WeighedLoss
from shardwise.stages.rows import RowRule
from shardwise.stages.stage import Batch, Loss


def agreed_loss(
    module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options, wires: Wires
) -> Tried:
    """What the loss is, if anything of a batch is cut; the same on all ranks, which call this alike.

    `rule` learns what is as long as the batch by chance. Refuses a loss that parts of a batch do not tell.
    """
    mine = Tried(LossKind.UNTRIED)
    # Under cp a loss has to be a pair anyway.
    if plan.dp * plan.microbatches > 1 and plan.cp == 1 and options.verify and not _is_meta(module):
        precision = partial(ComputePolicy.of(plan).precision, home_of(example))
        mine = try_loss(module, loss, example, rule, precision)
    found: list[Tried] = wires.gather(mine)
    tried = next((each for each in found if each.problem), None) or next(
        (each for each in found if each.kind is not LossKind.UNTRIED), mine
    )
    tried.check()
    rule.tables |= set(tried.tables)
    return tried


def weighed_loss(loss: Loss, tried: Tried, plan: Plan, options: Options) -> Loss:
    """The loss of a part, with its weight."""
    num_parts = plan.dp * plan.microbatches
    return WeighedLoss(loss, tried, num_parts=num_parts, by_rows=options.pad or options.is_local)


def _is_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in (*module.parameters(), *module.buffers()))
