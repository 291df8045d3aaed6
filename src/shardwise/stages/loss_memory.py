"""Whether a loss remembers something for its next call, as a running mean does, or a table with an entry per sample."""

from collections.abc import Sequence
from copy import copy

import torch

from shardwise.errors import some
from shardwise.stages.backward_trial import asks_for_mode
from shardwise.stages.metrics import take_metrics
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.split.switch import undisturbed
from shardwise.stages.stage import Batch
from shardwise.stages.trial_run import Run, Trial

#: Some rows, and the run that has computed the outputs of these.
_Part = tuple[Batch, Run]


def remembered_by(trial: Trial, parts: Sequence[_Part]) -> str | None:
    """Describe the state that the loss leaves for its next call, if that changes the next result; None if not.

    The next call may have the same rows (a table with an entry for each sample) or others (a running mean). Unless
    parts are computed in turn, state that does not depend on rows is allowed: all replicas have the same (a
    critic's power iteration). Training may leave more than an evaluation (`if torch.is_grad_enabled():`).
    """
    modes = (False, True) if asks_for_mode(trial.loss) else (False,)
    for has_grad in modes:
        kept = PythonState(trial.loss, with_buffers=True)
        try:
            with undisturbed(trial.module, {}, trial.loss), trial.precision(), torch.set_grad_enabled(has_grad):
                found = _remembered(trial, kept, parts)
        except Exception:  # It reads state that a forward leaves for it, and there is no forward here.
            continue
        if found:
            return some([f"{name} ({words})" for name, words in found.items()])
    return None


def _remembered(trial: Trial, kept: PythonState, parts: Sequence[_Part]) -> dict[str, str]:
    """Return what a call changes, if the next call then has another result."""
    changed: dict[str, str] = {}
    at_first: list[float] = []
    left: PythonState | None = None
    depends = trial.in_turn
    for part in parts:
        kept.restore()
        at_first.append(_total(trial, *part))
        changed.update(kept.changed())
        depends = depends or (left is not None and bool(left.changed()))
        left = left or kept.again()
    for part, total in zip(parts, at_first, strict=True) if changed and depends else ():
        kept.restore()
        _total(trial, *parts[0])
        if abs(_total(trial, *part) - total) > part[1].tolerance * abs(total):
            return changed
    return {}


def _total(trial: Trial, batch: Batch, run: Run) -> float:
    seed_torch(0)
    result, _ = take_metrics(trial.loss(run.output, copy(batch)))
    return float(result[0] if isinstance(result, tuple) else result)
