"""The loss and the gradients of a whole batch, computed by one process.

Trials ask one question each: do rows interact, what is the loss a mean over, can this layer be sharded? What no trial
asks would train something else. So the first step of an engine, and a few later ones, are also compared with this
(`engine/first_steps.py`), as a whole. It is computed for small modules only, and where both must be equal: nothing is
drawn at random, and nothing is computed for each part of a batch on purpose.
"""

import math
from collections.abc import Mapping
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
#: Differences relative to the norm of a gradient, and to that of all gradients: many operations round on the way. A GPU
#: may multiply in TF32.
_NEAR, _NEAR_ALL = {"cpu": 1e-4, "cuda": 2e-2}, {"cpu": 1e-6, "cuda": 1e-3}
#: A gradient may differ by this many units of rounding, however small it is.
_ROUNDING = 10.0


class WholeStep(NamedTuple):
    """A loss and the gradients of parameters by name. None for those that it does not depend on.

    `leaves`: whether the forward or the loss has left Python state that the next would read. `draws`: whether they have
    drawn from torch's generators: parts of the batch draw other numbers.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    leaves: bool = False
    draws: bool = False

    @property
    def size(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(
            sum(float(each.double().square().sum()) for each in self.gradients.values() if each is not None)
        )


def must_be_equal(module: nn.Module, example: Batch, tried: Tried, num_parts: int) -> bool:
    """Whether a step in parts has to give the result of the whole, as far as can be told without computing it, and
    whether that is quick to compute."""
    is_exact = all(each.dtype in (torch.float32, torch.float64) and not each.is_meta for each in module.parameters())
    norms = any(isinstance(each, RunningNormModule) and each.training for each in module.modules())
    kept = any(accumulated_hooks(each) for each in module.parameters())
    is_apart = num_parts > 1 and (tried.apart or tried.kind in (LossKind.BESIDE, LossKind.UNTRIED))
    return is_quick(module, example) and is_exact and not norms and not kept and not is_apart


def is_quick(module: nn.Module, batch: Batch, share: float = 1.0) -> bool:
    """Whether a whole step of this batch takes one process little time, or this `share` of it."""
    number = sum(each.numel() for each in module.parameters())
    longest = max((each.numel() for each in tensors_in(batch)), default=0)
    return number <= _MOST_PARAMETERS and longest <= _MOST_IN_ENTRY and number * longest <= share * _MOST_PRODUCTS


def whole_step(
    module: nn.Module, loss: Loss, example: Batch, precision: Context, *, num_parts: int, in_turn: bool
) -> WholeStep | None:
    """Compute one training step of the whole example, without an update; None if a step in `num_parts` parts need not
    be equal to it: one process may compute several `in_turn`, and each reads what the one before has left. Nothing that
    it changes is left. Draws begin at one seed."""
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    found: list[tuple[Tensor | None, ...]] = []
    leaves = draws = False

    def differentiate(total: Tensor, number: Any) -> None:
        nonlocal leaves, draws
        drawn, leaves = generators(), trial.has_changed()
        seed_torch(0)
        draws = any(not torch.equal(one, other) for one, other in zip(drawn, generators(), strict=True))
        mean = total if number is None else total / number
        if not (in_turn and leaves) and mean.requires_grad:
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
    loss_of_all = run.total if run.number is None else run.total / run.number
    return WholeStep(loss_of_all, gradients, leaves=leaves, draws=draws)


def generators() -> list[Tensor]:
    """Return the states of torch's generators."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states  # type: ignore[no-untyped-call]


def _copied(_: str, each: Any) -> Any:
    """Return a copy: a forward or a loss may write to its batch."""
    return each.clone() if isinstance(each, Tensor) else None


@torch.no_grad()
def difference(
    whole: WholeStep, loss: float, gradients: Mapping[str, Tensor | None] | None, kind: str, *, scale: float = 1.0,
    least: float = 0.0, closer: float = 1.0,
) -> str | None:  # fmt: skip
    """Describe how a loss, and gradients times `scale` if given, differ from a whole step; None if they do not.

    `kind` is that of the device. Differences are also relative to `least`, a norm of all gradients, if they are
    smaller: near a minimum they are sums of larger terms. `closer` divides what is taken for rounding.
    """
    near, near_all = _NEAR.get(kind, 2e-2) / closer, _NEAR_ALL.get(kind, 1e-3) / closer
    wanted = {name: each for name, each in whole.gradients.items() if each is not None and gradients is not None}
    size = max(least, whole.size)
    others: dict[str, float] = {}
    for name, each in wanted.items():
        norm, other = float(each.double().norm()), (gradients or {}).get(name)
        found = 0.0 if other is None else other.to(each.device).double() * scale
        distance = float((each.double() - found).norm())
        # Where equal numbers are subtracted, all of a gradient is rounding.
        if not distance <= near * norm + near_all * size + _ROUNDING * torch.finfo(each.dtype).eps:
            others[name] = distance / max(norm, 1e-30)
    if others:
        worst = max(others, key=lambda name: others[name])
        return (
            f"the gradients of {len(others)} of {len(wanted)} parameters differ, that of {worst} by"
            f" {100 * min(others[worst], 99.99):.2g} % of its norm (the loss is {loss:.6g}, and {whole.loss:.6g} there)"
        )
    if not abs(loss - whole.loss) <= 10 * near * abs(whole.loss) + 1e-5:
        return f"the loss is {loss:.6g}, and {whole.loss:.6g} there"
    return None
