"""Try a user's loss for parts of sequences: find its kind, if it is one number."""

import torch
from torch import Tensor, nn

from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_trial import at_first, try_backward, try_loss
from shardwise.stages.rows import RowRule
from shardwise.stages.split.arguments import Signature
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.trial_rows import three_rows, two_and_one
from shardwise.stages.trial_run import Context, Trial


def try_tokens(
    module: nn.Module,
    loss: Loss,
    example: Batch,
    rule: RowRule,
    precision: Context,
    *,
    meets: bool = False,
    for_all: bool = False,
    num_parts: int = 1,
    in_turn: bool = True,
) -> Tried:
    """Find whether backwards of parts can add up to that of the whole; and whether a loss that is one number is purely
    a mean over labels, so that parts are weighted by their labels, or a sum to which padding tokens, without labels,
    add nothing.

    If rows are cut too (`num_parts` over 1), they are tried as without cp: rows must not interact either."""
    tried = try_backward(module, loss, example, rule, precision, for_all=for_all)
    if tried.problem is not None:
        return tried
    three = three_rows(example, rule.look(example))
    trial = Trial(module, loss, precision, at_first=at_first(for_all))
    try:
        whole = trial.run(three)
        if whole.number is not None and num_parts == 1:
            return tried._replace(decides=trial.decides(three, two_and_one(three, rule.look(example))[1]))
        found = try_loss(
            module, loss, example, rule, precision, meets=meets, for_all=for_all, num_parts=num_parts, in_turn=in_turn
        )
        if whole.number is not None or (num_parts > 1 and found.problem is not None):
            return found._replace(writes_none=tried.writes_none)
        is_told = found.kind is LossKind.LABELS or (
            found.kind is LossKind.SUM and trial.run(_unlabelled(module, three), output=whole.output).total == 0
        )
    except Exception:
        return tried
    if is_told and found.problem is None and not found.inside:
        return found
    return tried._replace(of_whole=found)


def _unlabelled(module: nn.Module, batch: Batch) -> Batch:
    """Return the batch with all labels ignored, in every integer entry that the module itself does not take."""
    taken = Signature(module).names
    return {
        name: torch.full_like(each, -100)
        if isinstance(each, Tensor) and name not in taken and not each.is_floating_point() and each.dtype != torch.bool
        else each
        for name, each in batch.items()
    }
