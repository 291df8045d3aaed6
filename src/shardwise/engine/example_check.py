"""Check the example before anything is cut: which entries are rows, and the kind of the loss, alike on all ranks."""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from shardwise.engine.agreement import tried_by_first
from shardwise.engine.batches import Cutter
from shardwise.engine.options import Options
from shardwise.engine.same_weights import agree_on_set, check_given
from shardwise.engine.tried_again import TriedAgain
from shardwise.engine.whole_example import TriedExample, try_example
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.sharding.tensor import ByFirst
from shardwise.stages.batch import home_of
from shardwise.stages.losses import WeighedLoss, numbers_in, summed_only
from shardwise.stages.rows import RowRule, check_openable
from shardwise.stages.split.arguments import Signature
from shardwise.stages.stage import Batch, Loss


class Checked(NamedTuple):
    """The microbatches of the example and their device, the rule by which they were cut, and the kind of the loss.

    `found` is what trials have found. `loss` is the user's, for a microbatch; `weighed` is the same with its weight in
    the batch. `by_first`: how one rank tries what `tp` cuts, if ranks share the example. `settings` are values that a
    script may set later, unless nothing is tried.
    """

    microbatches: list[Batch]
    device: torch.device
    rule: RowRule
    found: TriedExample
    loss: Loss
    weighed: WeighedLoss
    by_first: ByFirst | None
    settings: TriedAgain | None


def check_example(module: nn.Module, plan: Plan, loss: Loss, example: Batch, options: Options, wires: Wires) -> Checked:
    """Refuse an example that ranks do not share, and a loss that parts of a batch do not tell. All call this alike."""
    check_given(module, plan, example, wires, is_local=options.is_local)
    if plan.dp * plan.microbatches > 1:
        check_openable(example)
    rule = RowRule(Signature(module).names)
    found = try_example(module, plan, loss, example, rule, options, wires)
    tried, around = found.tried, found.around
    rule.tables |= set(tried.tables)
    cutter = Cutter(plan, wires.mesh, rule, pad=options.pad, is_local=options.is_local)
    microbatches = cutter.cut(example)
    settings = None
    if options.verify:
        settings = TriedAgain(module, loss, plan, rule, tensor=options.tensor, example=example)
        settings.around = around
        settings.agree = partial(agree_on_set, wires) if plan.cp > 1 else None
    num_parts = plan.dp * plan.microbatches * plan.cp
    users = loss
    if plan.cp > 1:
        # A trial compares means over parts of sequences with that over the whole. A step adds up parts of a sum.
        users = summed_only(loss, plan.cp, tried, lambda _: 1 / num_parts)
        loss = summed_only(loss, plan.cp, tried, partial(numbers_in, tuple(example)))
    by_rows = options.pad or options.is_local
    weighed = WeighedLoss(
        users,
        tried,
        num_parts=plan.dp * plan.microbatches,
        by_rows=by_rows,
        is_all=num_parts == 1,
    )
    if settings is not None and not options.is_local:
        settings.tried, settings.weigh = tried, weighed.weigh
    device = home_of(microbatches[0])
    by_first = None if options.is_local else partial(tried_by_first, wires.gather, wires.rank, device)
    return Checked(microbatches, device, rule, found, loss, weighed, by_first, settings)
