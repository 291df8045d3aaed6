"""Try the loss on the example, and compute the step of the whole example, with which the first step is compared."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import nn

from shardwise.engine.loss_agreement import agree_on_loss
from shardwise.engine.options import Options
from shardwise.engine.same_batch import Checksum
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.loss_kind import Tried
from shardwise.stages.rows import RowRule
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.whole_copy import WholeCopy, keep_copy
from shardwise.stages.whole_step import WholeStep, must_be_equal, whole_step


class Compared(NamedTuple):
    """What the first steps are compared with: the loss, the example's checksum, and on the first rank the whole step of
    the example and a copy of the module for others."""

    loss: Loss
    whole: WholeStep | None
    example: int
    copy: WholeCopy | None = None


class TriedExample(NamedTuple):
    """What was found of a loss, the same on all ranks.

    `is_quiet`: module and loss are known not to communicate, so that one rank may run trials for all; `around` is the
    context for these. `compared` is what the first step is compared with, if it can be.
    """

    tried: Tried
    is_quiet: bool
    around: Callable[[], AbstractContextManager[None]]
    compared: Compared | None


def try_example(
    module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options, wires: Wires
) -> TriedExample:
    """Find the kind of the loss, and compute the whole step on the first rank. All ranks call this alike."""
    checksum = Checksum(example).read()
    tried, is_quiet, around = agree_on_loss(module, plan, loss, example, rule, options, wires)
    num_parts = plan.dp * plan.microbatches * plan.cp
    is_compared = options.verify and not options.is_local and plan.num_ranks * num_parts > 1
    if not is_compared or not must_be_equal(module, example, tried, num_parts):
        return TriedExample(tried, is_quiet, around, None)
    whole, copy = None, None
    if wires.rank == 0 and Checksum(example).read() == checksum:  # A loss may have written to it in its trials.
        precision = options.precision_of(plan, example)
        with around():
            in_turn = plan.microbatches > 1
            whole = whole_step(module, loss, example, precision, num_parts=num_parts, in_turn=in_turn)
        # Its code asks for ranks if something has to be around it.
        if whole is not None and around is nullcontext:
            copy = keep_copy(module, loss, example, precision, whole, num_parts=num_parts, in_turn=in_turn)
    return TriedExample(tried, is_quiet, around, Compared(loss, whole, checksum, copy))
