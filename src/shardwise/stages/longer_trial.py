"""Try a loss on more than three rows, and with wider one-hot tables: interactions between rows may depend on how many
there are, and on their values.

    if len(x) >= 4:                         three rows do not interact
    room = chosen.cumsum(0) <= capacity     three rows all fit, and all rows of a batch do not
    F.one_hot(labels)                       as wide as the largest label of a part
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.stages.drawn_trial import find_met
from shardwise.stages.entry_trial import computes_loss
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_parts import fits, fits_by, mismatch
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.rows import Seen, changed, nodes, take_rows
from shardwise.stages.split.names_reached import names_reached
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import FIRST, NUM_ROWS, is_mask, two_and_one, with_hidden
from shardwise.stages.trial_run import Run, Runs, Trial, is_finite

#: As many rows are tried as have this many numbers in the largest entry: a few rows may be long.
_MOST_NUMBERS = 2**13
#: The factor on the tolerance: more numbers are summed than for three rows, in another order.
_SLACK = 10.0
#: About this many integers are tried in an entry.
_WORDS = 12


def find_longer(
    trial: Trial, example: Batch, three: Batch, seen: Seen, tried: Tried, *, is_drawn: bool = False
) -> Tried:  # fmt: skip
    """Return the finding from three rows, with a problem if it does not hold for more rows; or, also of a loss that
    `is_drawn` at random, if rows meet where something is drawn."""
    found = tried if is_drawn else _of_longer(trial, example, three, seen, tried)
    return find_met(trial, three, seen, found)


def _of_longer(trial: Trial, example: Batch, three: Batch, seen: Seen, tried: Tried) -> Tried:
    if trial.meets or tried.apart or tried.kind not in (LossKind.ROWS, LossKind.LABELS, LossKind.SUM, LossKind.PAIR):
        return tried
    try:
        problem = _of_more_rows(trial, example, seen, tried.kind) or _of_other_labels(trial, three, seen, tried)
        problem = problem or _of_alike_rows(trial, three, seen, tried) or _of_other_weights(trial, three, seen, tried)
        if problem is not None:
            return tried._replace(problem=problem)
        return _of_wider_tables(trial, three, tried)
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return tried


def find_in_pairs(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> Tried:
    """Refuse rows that interact in pairs if a part has an odd number of rows. The first two of three rows are a
    pair."""
    if tried.kind not in (LossKind.ROWS, LossKind.LABELS, LossKind.SUM):
        return tried
    try:
        parts = [take_rows(three, Seen(NUM_ROWS, seen.paths), *each) for each in ((0, 2), (0, 1), (1, 2))]
        runs = trial.run(parts[0]), trial.run(parts[1]), trial.run(parts[2])
    except Exception:
        return tried
    adds_up = fits_by(1, 1, *runs) if tried.kind is LossKind.ROWS else fits(tried.kind, *runs)
    if adds_up or not all(map(is_finite, runs)) or trial.run(parts[0], seed=1).total != runs[0].total:
        return tried
    return tried._replace(problem=mismatch(*runs, 2, 1))


def _of_more_rows(trial: Trial, example: Batch, seen: Seen, kind: LossKind) -> str | None:
    longest = max((_numbers_of(each) for path, each in nodes(example) if path in seen.paths), default=0)
    number = min(seen.length, _MOST_NUMBERS * seen.length // max(1, longest))
    if number <= NUM_ROWS:
        return None
    half = number - number // 2
    parts = [take_rows(example, seen, *each) for each in ((0, number), (0, half), (half, number))]
    problem = _mismatch_of([trial.run(each) for each in parts], kind, number)
    if problem is None and "training" in names_reached(trial.module, trial.loss):
        problem = _in_training(trial, parts, kind, number)
        if problem is None and trial.has_own_norms:
            # Those of two halves are alike until they are trained.
            with moved_weights(trial.module):
                problem = _in_training(trial.again(), parts, kind, number)
        return problem
    if problem is None or trial.run(parts[0], seed=1).total != trial.run(parts[0]).total:
        return None
    return f"more rows than {NUM_ROWS} do something else: {problem}"


def _in_training(trial: Trial, parts: list[Batch], kind: LossKind, number: int) -> str | None:
    """Try them in training mode too: three rows may not fit a forward that mixes halves of a batch there."""
    try:
        runs = [trial.run_in_training(each)[0] for each in (*parts, parts[0])]
    except Exception:  # Training will report what is wrong.
        return None
    is_steady = runs[3].total == runs[0].total and not any(each.has_drawn or each.writes for each in runs)
    problem = _mismatch_of(runs[:3], kind, number) if is_steady else None
    return None if problem is None else f"in training mode {problem}"


def _mismatch_of(runs: list[Run], kind: LossKind, number: int) -> str | None:
    """Say that the halves of some rows do not give their loss; None if they do."""
    whole, large, small = runs
    half = number - number // 2
    weights: tuple[float, float] = (half, number - half)
    if kind is LossKind.LABELS:
        if not all(len(each.counts) == 1 for each in runs):
            return None
        weights = large.counts[0], small.counts[0]
    elif kind in (LossKind.SUM, LossKind.PAIR):
        weights, whole = (1, 1), whole._replace(total=whole.total / 2)
    if not all(map(is_finite, runs)) or fits_by(*weights, whole, large, small, slack=_SLACK):
        return None
    return mismatch(runs[0], large, small, number, half)


def _of_other_labels(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> str | None:
    """Try a mean over rows with each of a few integers in its entries: it may leave one of them out (`labels != 3`)."""
    if tried.kind is not LossKind.ROWS or tried.inside:
        return None
    runs = _runs_of(trial, three, seen)
    for path, entry in nodes(three):
        if path not in seen.paths or not _is_whole(entry):
            continue
        most = int(entry.max())
        is_inside = trial.takes(path) and computes_loss(runs)
        for value in sorted(
            {1, 2, 3, most}
            if is_inside
            else {1, 2, 3, *(1 + (most - 1) * part // _WORDS for part in range(_WORDS + 1))}
        ):
            hidden = with_hidden(three, seen, value, path)
            less = trial.less(hidden, seen, runs, again=is_inside) if value <= most else None
            if less is not None and not fits_by(FIRST, NUM_ROWS - FIRST, *less):
                whole, large, small = (each.total for each in less)
                return (
                    f"the loss is divided by something that {path} decides: with {value} for some of it in {FIRST}"
                    f" rows, the loss of {NUM_ROWS} rows is {whole:.6g}, and not the mean of {large:.6g} and"
                    f" {small:.6g} by rows, so parts of a batch do not tell its loss"
                )
    return None


def _of_alike_rows(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> str | None:
    """Try rows with the same integer: rows of one class, or of one user, may interact.

    Entries with several for each row are left as they are: a mask may say which of them count."""
    runs = None
    for path, entry in nodes(three):
        if path not in seen.paths or not _is_whole(entry) or entry.dim() > 1 or bool((entry == entry[-1]).all()):
            continue
        alike = _with(three, path, entry[[-1] * NUM_ROWS])
        runs = runs or _runs_of(trial, three, seen)
        less = trial.less(alike, seen, runs, again=trial.takes(path))
        if less is not None and not _fits(tried.kind, *less) and not trial.is_random(alike):
            return f"with the same {path} in all rows {mismatch(*less)}"
    return None


def _of_other_weights(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> str | None:
    """Try other fractions where an entry has the same in all rows: weights of rows that are 1 at first."""
    runs = None
    for path, entry in nodes(three):
        is_one = isinstance(entry, Tensor) and entry.is_floating_point() and entry.dim() == 1
        if path not in seen.paths or not is_one or not bool((entry == entry[-1]).all()) or not float(entry[-1]):
            continue
        by = torch.tensor([0.25, 0.5, 1.0], dtype=entry.dtype, device=entry.device)
        other = _with(three, path, entry * by)
        runs = runs or _runs_of(trial, three, seen)
        less = trial.less(other, seen, runs, again=trial.takes(path))
        if less is not None and not _fits(tried.kind, *less) and not trial.is_random(other):
            return f"with fractions in {path} that are not the same in all rows {mismatch(*less)}"
    return None


def _with(three: Batch, path: str, made: Tensor) -> Batch:
    """Return the batch with another entry."""
    return changed(three, lambda here, _: made if here == path else None)  # type: ignore[no-any-return]


def _runs_of(trial: Trial, three: Batch, seen: Seen) -> Runs:
    two, one = two_and_one(three, seen)
    return trial.run(three), trial.run(two), trial.run(one)


def _fits(kind: LossKind, whole: Run, large: Run, small: Run) -> bool:
    if kind is LossKind.LABELS and not all(len(each.counts) == 1 for each in (whole, large, small)):
        return True
    return fits(LossKind.SUM if kind is LossKind.PAIR else kind, whole, large, small)


def _is_whole(entry: Any) -> bool:
    is_tensor = isinstance(entry, Tensor) and not entry.is_floating_point() and not entry.is_complex()
    return is_tensor and entry.numel() > 0 and not is_mask(entry)


def _numbers_of(entry: Any) -> int:
    return entry.numel() if isinstance(entry, Tensor) else 0


def _of_wider_tables(trial: Trial, three: Batch, tried: Tried) -> Tried:
    if "one_hot" not in names_reached(trial.module, trial.loss):
        return tried
    runs: list[Run | None] = [trial.run(three)]
    wider = _WiderTables()
    try:
        runs.append(trial.run(three, within=lambda: wider))
    except Exception:
        runs.append(None)
    first, second = runs
    assert first is not None
    is_same = second is not None and abs(second.total - first.total) <= first.tolerance * abs(first.total)
    if not wider.has_widened or is_same:
        return tried
    return tried._replace(
        problem="one_hot without num_classes is as wide as the largest number that it is given, another for each part"
        " of a batch, and the loss depends on that",
        remedy="one_hot(x, num_classes=...)",
    )


class _WiderTables(TorchFunctionMode):
    """Adds a column to one-hot tables without `num_classes`, as if another part had a larger number."""

    def __init__(self) -> None:
        super().__init__()
        self.has_widened = False

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is not functional.one_hot or (len(args) > 1 and args[1] >= 0) or kwargs.get("num_classes", -1) >= 0:
            return made
        self.has_widened = True
        return torch.cat((made, torch.zeros_like(made[..., :1])), -1)
