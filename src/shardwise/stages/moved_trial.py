"""Try a loss with other weights: those that training begins with may hide what training brings out.

    reference = copy.deepcopy(policy)         a term that compares them is the same number for all rows

and see `moved_weights.py`, which moves weights for a few runs.
"""

from collections.abc import Callable

from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.rows import Seen
from shardwise.stages.split.names_reached import names_reached
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import two_and_one, with_hidden
from shardwise.stages.trial_run import Runs, Trial, is_finite

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
            holds = tried.kind is not LossKind.UNTRIED and _holds(trial, three, seen, tried, runs, fits_as)
            if holds and not _is_other_in_training(trial, three, runs):
                return tried
            found = outcome(trial, three, seen)
        except Exception:  # It may not run with any other weights.
            return tried
    if found.problem is not None:
        return found._replace(problem=f"with other weights than those that training begins with, {found.problem}")
    return tried if found.kind is LossKind.UNTRIED else found


def _is_other_in_training(trial: Trial, three: Batch, runs: Runs) -> bool:
    """Whether the forward may be written for two modes, and is another in training."""
    if "training" not in names_reached(trial.module, trial.loss):
        return False
    return trial.run_in_training(three)[0].total != runs[0].total


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
