"""Try a loss with other weights: those that training begins with may hide what training brings out.

    gate = nn.Parameter(torch.zeros(()))      a branch that mixes rows adds nothing, until the gate has moved
    nn.init.zeros_(adapter.up.weight)         so does an adapter
    reference = copy.deepcopy(policy)         a term that compares them is the same number for all rows

So small parameters that are trained are moved for a few runs, and large ones if they are all 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.rows import Seen
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import two_and_one, with_hidden
from shardwise.stages.trial_run import Runs, Trial, is_finite

#: Parameters with at most this many elements are moved, and copied for that: norms, gates, factors of adapters.
_SMALL = 2**18
#: The most that they are moved by, relative to their size; and those that are 0, or nearly.
_BY, _AT_LEAST = 0.5, 0.1

_Outcome = Callable[[Trial, Batch, Seen], Tried]
_Fits = Callable[[Tried, Batch, Seen, Runs], bool]


def find_moved(trial: Trial, three: Batch, seen: Seen, tried: Tried, outcome: _Outcome, fits_as: _Fits) -> Tried:
    """Return the finding of a loss; another, from the trials of `outcome`, if it does not hold with moved weights."""
    if trial.meets or tried.apart or tried.failed or tried.kind is LossKind.BESIDE:
        return tried
    with moved_weights(trial.module) as is_moved:
        if not is_moved:
            return tried
        two, one = two_and_one(three, seen)
        try:
            runs = trial.run(three), trial.run(two), trial.run(one)
            if not all(map(is_finite, runs)) or trial.run(three, seed=1).total != runs[0].total:
                return tried
            if tried.kind is not LossKind.UNTRIED and _holds(trial, three, seen, tried, runs, fits_as):
                return tried
            found = outcome(trial, three, seen)
        except Exception:  # It may not run with any other weights.
            return tried
    if found.problem is not None:
        return found._replace(problem=f"with other weights than those that training begins with, {found.problem}")
    return tried if found.kind is LossKind.UNTRIED else found


def _holds(trial: Trial, three: Batch, seen: Seen, tried: Tried, runs: Runs, fits_as: _Fits) -> bool:
    """Whether parts still give the loss of the whole, also with values hidden if they did so before."""
    if not fits_as(tried, three, seen, runs):
        return False
    if tried.kind in (LossKind.PAIR, LossKind.EVEN):
        return True  # Batches with ignored labels were not part of the finding.
    if tried.through is not None:
        value = tried.through.hidden
        hidden = with_hidden(three, seen, value, tried.through.path)
        less = trial.less(hidden, seen, runs, again=value in (None, 0) and not isinstance(value, float))
    else:
        hidden = with_hidden(three, seen, 0)
        less = trial.less(hidden, seen, runs, 1.0)
    return less is None or fits_as(tried, hidden, seen, less)


@contextmanager
def moved_weights(module: nn.Module) -> Iterator[bool]:
    """Move weights within the context; whether there are any to move. Afterwards they are exactly as before."""
    kept: list[tuple[Tensor, Tensor | None]] = []
    try:
        with torch.no_grad():
            for each in module.parameters():
                if each.requires_grad and _can_move(each):
                    kept.append((each.data, each.data.clone() if each.numel() <= _SMALL else None))
                    _move(each.data)
        yield bool(kept)
    finally:
        with torch.no_grad():
            # In reverse order: two parameters may share memory.
            for data, value in reversed(kept):
                if value is None:
                    data.zero_()
                else:
                    data.copy_(value)


def _can_move(each: Tensor) -> bool:
    if nn.parameter.is_lazy(each) or each.is_meta or each.is_inference() or not each.is_floating_point():
        return False
    if each.layout is not torch.strided or 0 in each.stride() or not each.numel():
        return False
    return each.numel() <= _SMALL or not bool(each.any())


def _move(data: Tensor) -> None:
    # Not drawn: trials leave generators alone.
    number = torch.arange(1, 1 + data.numel(), dtype=torch.float64, device=data.device)
    size = max(float(data.double().square().mean().sqrt()), _AT_LEAST)
    data.add_(number.square_().mul_(0.7).cos_().mul_(_BY * size).view(data.shape).to(data.dtype))
