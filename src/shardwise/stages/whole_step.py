"""The loss and the gradients of the whole example, computed by one process before its module is cut.

Trials ask one question each: do rows interact, what is the loss a mean over, can this layer be sharded? What no trial
asks would train something else. So the first step of an engine is also compared with this one, as a whole
(`engine/first_step.py`). It is kept for small modules only, and where both must be equal: nothing is drawn at random,
and nothing is computed for each part of a batch on purpose.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.no_collectives import CollectiveMetError, NoCollectives
from shardwise.stages.rows import changed, tensors_in, unmarked
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.trial_run import Context, Trial
from shardwise.torch_private import RunningNormModule, accumulated_hooks

#: The most elements of all parameters, of an entry of the example, and of one for each element of the other: a few
#: times this many operations are a second of one core.
_MOST_PARAMETERS, _MOST_IN_ENTRY, _MOST_PRODUCTS = 2**23, 2**20, 2**32


class WholeStep(NamedTuple):
    """A loss and the gradients of parameters by name. None for those that it does not depend on."""

    loss: float
    gradients: dict[str, Tensor | None]


class Compared(NamedTuple):
    """What a first step is compared with: the loss and its whole step, which the first rank has, and the example's
    checksum."""

    loss: Loss
    whole: WholeStep | None
    example: int


def must_be_equal(module: nn.Module, example: Batch, tried: Tried, num_parts: int) -> bool:
    """Whether a step in parts has to give the result of the whole, as far as can be told without computing it, and
    whether that is quick to compute."""
    number = sum(each.numel() for each in module.parameters())
    longest = max((each.numel() for each in tensors_in(example)), default=0)
    is_small = number <= _MOST_PARAMETERS and longest <= _MOST_IN_ENTRY and number * longest <= _MOST_PRODUCTS
    is_exact = all(each.dtype in (torch.float32, torch.float64) and not each.is_meta for each in module.parameters())
    norms = any(isinstance(each, RunningNormModule) and each.training for each in module.modules())
    kept = any(accumulated_hooks(each) for each in module.parameters())
    is_apart = num_parts > 1 and (tried.apart or tried.kind in (LossKind.BESIDE, LossKind.UNTRIED))
    return is_small and is_exact and not norms and not kept and not is_apart


def whole_step(
    module: nn.Module, loss: Loss, example: Batch, precision: Context, *, num_parts: int, in_turn: bool
) -> WholeStep | None:
    """Compute one training step of the whole example, without an update; None if a step in `num_parts` parts need not
    be equal to it: one process may compute several `in_turn`, and each reads what the one before has left. Nothing that
    it changes is left."""
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    found: list[tuple[Tensor | None, ...]] = []

    def differentiate(total: Tensor, number: Any) -> None:
        drawn = torch.get_rng_state()
        seed_torch(0)
        has_drawn = not torch.equal(drawn, torch.get_rng_state())
        is_followed = in_turn and trial.has_changed()
        mean = total if number is None else total / number
        if not has_drawn and not is_followed and mean.requires_grad:
            found.append(torch.autograd.grad(mean, list(parameters.values()), allow_unused=True))

    trial = Trial(module, loss, precision, at_first=NoCollectives)
    try:
        run = trial.run(changed(unmarked(example), _copied), training=True, look=differentiate)
    except (Exception, CollectiveMetError):  # What is wrong with it, training will report.
        return None
    is_pair_of_parts = run.number == 1 and num_parts > 1
    if not found or run.has_drawn or run.has_left or run.writes or is_pair_of_parts or run.tolerance > 1e-3:
        return None
    if any(each is not None and not bool(each.isfinite().all()) for each in found[0]):
        return None
    gradients = {name: None if each is None else each.detach() for name, each in zip(parameters, found[0], strict=True)}
    return WholeStep(run.total if run.number is None else run.total / run.number, gradients)


def _copied(_: str, each: Any) -> Any:
    """Return a copy: a forward or a loss may write to its batch."""
    return each.clone() if isinstance(each, Tensor) else None
