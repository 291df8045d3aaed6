"""Try a user's loss with numbers, to find what it is a mean over, if it is one.

A plan computes the loss on parts of a batch and adds up. That gives the loss of the whole only if the parts are
weighted by what the loss is a mean over. So it is tried on three rows, on two of them and on one, in evaluation mode:

    loss of 3 = (2 * loss of 2 + 1 * loss of 1) / 3          a mean over rows: parts weigh as much as they have rows
    loss of 3 = loss of 2 + loss of 1                        a sum: parts are added, and not divided
    the first, weighted by labels that are not ignored       a mean over labels: parts are weighted by their labels
    the first, weighted by what an entry lets through        a mean by a mask: parts are weighted by its sum
    none of them                                             refused

The same is tried with masks that hide parts of two rows, and with ignored labels there: a loss that is a mean over rows
only while nothing is hidden would silently go wrong in a later batch. The same with targets that are NaN or another
marker of unknown values, and with gradients (`slope_trial.py`). It is tried in training mode, with deterministic draws
(`steady_draws.py`): a forward may compute something else there, and its backward may not be linear
(`backward_trial.py`). And on more rows, if they are not long (`longer_trial.py`), and with other weights
(`moved_trial.py`): those at the start may hide a term, or what mixes rows.
"""

from contextlib import nullcontext
from typing import Any

from torch import nn

from shardwise.stages.across_rows import THE_LOSS, first_across, with_numbers_of
from shardwise.stages.entry_trial import are_inside, count_the_same, find_entry, fits_through, with_numbers
from shardwise.stages.index_check import IndexCheck
from shardwise.stages.longer_trial import find_in_pairs, find_longer
from shardwise.stages.loss_kind import (
    DRAWN,
    LEARNED_NUMBER,
    OWN_BACKWARD,
    REMEDY,
    REMEDY_OF_BENT,
    REMEDY_OF_DRAWN,
    REMEDY_OF_LEARNED,
    REMEDY_OF_MEANS,
    REMEDY_OF_OWN,
    REMEDY_OF_PARTS,
    LossKind,
    Tried,
)
from shardwise.stages.loss_memory import remembered_by
from shardwise.stages.loss_parts import fits, fits_by, is_mean, mismatch
from shardwise.stages.moved_trial import find_moved
from shardwise.stages.no_collectives import NoCollectives
from shardwise.stages.rows import RowRule, Seen, take_rows, tensors_in, unmarked
from shardwise.stages.slope_trial import by_parameters, slopes_of
from shardwise.stages.spread_outputs import SIGNED_WAYS, WAYS, in_full, spread, spread_signals
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.trial_rows import (
    FIRST,
    MARKS,
    NUM_ROWS,
    UNKNOWN,
    has_fractions,
    three_rows,
    two_and_one,
    ways_to_hide,
    with_hidden,
)
from shardwise.stages.trial_run import Context, Run, Runs, Trial, are_left_alike, is_finite

#: Outputs with more elements than this are not tried on the host.
_MOST_ON_HOST = 2**27
#: Losses that are smaller than this share of the tolerance are 0, or the rounding of two models that are equal.
_NOTHING = 0.1


def try_loss(
    module: nn.Module,
    loss: Loss,
    example: Batch,
    rule: RowRule,
    precision: Context = nullcontext,
    *,
    meets: bool = False, for_all: bool = False, num_parts: int = 1, in_turn: bool = True, starts: bool = True,
    compares_buffers: bool = True,
) -> Tried:  # fmt: skip
    """Find the kind of a loss from a few rows of an example that the module can compute.

    `num_parts` is the number of parts of a batch; one process computes several of them if `in_turn`. `meets`: rows of a
    part are known to interact, and that is intended. `starts`: the backward of a part begins with another gradient.
    `for_all`: no other rank tries it; raise `CollectiveMetError` if all must. `compares_buffers`: replicas compare what
    rows have written to buffers."""
    seen = rule.look(example)
    options: dict[str, Any] = {"meets": meets, "at_first": at_first(for_all), "in_turn": in_turn, "starts": starts}
    options["compares_buffers"] = compares_buffers
    trial = Trial(module, loss, precision, **options)
    three = three_rows(example, seen)
    first = _outcome(trial, three, seen)
    drawn = _with_draws(trial, three, seen, first)
    if drawn is not None and drawn.problem is None:
        return find_longer(trial, example, three, seen, drawn, is_drawn=True) if num_parts > 1 else drawn
    first = drawn or first
    if first.problem is None:
        # Another trial: this one has a snapshot of the weights as they are.
        moved = find_moved(Trial(module, loss, precision, **options), three, seen, first, _outcome, _fits_as)
        if moved.problem is not None:
            return moved
        first = moved
    if first.problem is None and seen.length // num_parts % 2:
        first = find_in_pairs(trial, three, seen, first)
    if first.problem is None and trial.is_rounded:
        first = _in_full(trial, three, seen, first)
    if first.problem is None and num_parts > 1:
        first = find_longer(trial, example, three, seen, first)
    if first.problem is None and first.kind is not LossKind.UNTRIED:
        return first if first.apart else first._replace(decides=trial.decides(three, two_and_one(three, seen)[1]))
    # Perhaps an entry is as long as the batch by chance, and is not cut along its rows.
    for path in sorted(seen.paths):
        fewer = Seen(seen.length, seen.paths - {path})
        if fewer.paths:
            again = trial if drawn is None else trial.with_draws(fewer)
            found = _outcome(again, three_rows(example, fewer), fewer)
            if found.problem is not None or not found.depends:
                continue
            if first.failed:  # Nothing can be computed from a part of this entry.
                return found._replace(tables=(path,))
            remedy = f"batch[{path!r}] = sw.whole(batch[{path!r}]) if it has no entry for each row; else {first.remedy}"
            return first._replace(remedy=remedy)
    untold = first.kind is LossKind.UNTRIED and first.problem is None
    return (_by_halves(trial, example, seen) if untold else None) or _of_parts(trial, example, seen, first)


def _with_draws(trial: Trial, three: Batch, seen: Seen, first: Tried) -> Tried | None:
    """Try a loss that draws at random with the same numbers for a row in each run; None if that tells nothing. With
    others for each part, no kind fits it."""
    if first.problem is not None or first.failed or first.kind not in (LossKind.UNTRIED, LossKind.PAIR):
        return None
    try:
        if not trial.is_random(three):
            return None
        at_start, moved = trial.with_draws(seen), trial.with_draws(seen)
        found = _outcome(at_start, three, seen)
        if found.problem is None and found.kind is not LossKind.UNTRIED:
            found = find_moved(moved, three, seen, found, _outcome, _fits_as)
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return None
    is_told = found.problem is not None or found.kind is not LossKind.UNTRIED
    return found if is_told and not (at_start.is_lost or moved.is_lost or found.failed) else None


def _in_full(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> Tried:
    """Try the loss of 16-bit outputs in full precision: rounding hides terms with small weights."""
    if tried.kind not in (LossKind.ROWS, LossKind.LABELS, LossKind.SUM) or tried.inside:
        return tried
    batches = (three, *two_and_one(three, seen))
    try:
        whole, large, small = (trial.run(each).output for each in batches)
        outputs = in_full((whole, large, small), trial.unrounded(batches, whole)) if _is_small(whole) else None
        if outputs is None:
            return tried
        runs = [trial.run(each, output=made, in_full=True) for each, made in zip(batches, outputs, strict=True)]
        whole, large, small = now = (runs[0], runs[1], runs[2])
        is_random = trial.run(three, seed=1, output=outputs[0], in_full=True).total != whole.total
    except Exception:  # It may need outputs of 16 bits.
        return tried
    if is_random or not all(map(is_finite, now)) or _fits_as(tried, three, seen, now):
        return tried
    return tried._replace(problem=mismatch(*now))


def at_first(for_all: bool) -> Context:
    """Return the context for the first runs of a trial: a rank that tries for all must not wait for the others."""
    return NoCollectives if for_all else nullcontext


def _of_parts(trial: Trial, example: Batch, seen: Seen, first: Tried) -> Tried:
    """Refuse a module or loss that takes all rows but fails on half of them, for example with offsets as an entry."""
    half = seen.length // 2
    if not first.failed or not half:
        return first
    try:
        trial.run(unmarked(example))
    except Exception:
        return first
    try:
        for each in ((0, half), (half, 2 * half)):
            trial.run(take_rows(example, seen, *each))
    except Exception as error:
        cut, why = ", ".join(sorted(seen.paths)), f"{type(error).__name__}: {error}".splitlines()[0]
        return first._replace(
            problem=f"module and loss take {seen.length} rows, and fail on {half} of them (cut: {cut}): {why}",
            remedy="rows that stand by themselves: padded ones and their lengths in place of offsets; or sw.whole(...)"
            " around an entry that has no entry for each row",
        )
    return first


def _by_halves(trial: Trial, example: Batch, seen: Seen) -> Tried | None:
    """Try halves of more rows if three rows are not conclusive: rows in pairs, the worst two of a batch."""
    for number in sorted(each for each in {4, 8, seen.length} if 1 < each <= seen.length):
        half = number - number // 2
        try:
            parts = [take_rows(example, seen, *each) for each in ((0, number), (0, half), (half, number))]
            whole, large, small = runs = trial.run(parts[0]), trial.run(parts[1]), trial.run(parts[2])
            is_random = trial.run(parts[0], seed=1).total != whole.total
        except Exception:
            continue
        if whole.number is not None or is_random or not is_finite(whole):
            return None
        if not any(each.total for each in runs):
            continue  # More rows may show more.
        weights: dict[LossKind, tuple[float, float]] = {LossKind.ROWS: (half, number - half)}
        if len(whole.counts) == len(large.counts) == len(small.counts) == 1:
            weights = {LossKind.LABELS: (large.counts[0], small.counts[0]), **weights}
        kinds = [kind for kind, each in weights.items() if fits_by(*each, *runs)]
        kinds += [LossKind.SUM] if fits(LossKind.SUM, *runs) else []
        if kinds and all(map(is_finite, runs)):
            return Tried(kinds[0], labels=max(1, whole.labels * NUM_ROWS // number))
        return Tried(LossKind.ROWS, mismatch(*runs, number, half))
    return None


def _outcome(trial: Trial, three: Batch, seen: Seen) -> Tried:
    two, one = two_and_one(three, seen)
    try:
        runs = whole, large, small = trial.begin(three), trial.run(two), trial.run(one)
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return Tried(LossKind.UNTRIED, failed=True)
    if not all(map(is_finite, runs)):
        # Finite for all rows but not for some of them: those rows make a divisor zero.
        return Tried(LossKind.UNTRIED, mismatch(*runs) if is_finite(whole) else None)
    remembered = remembered_by(trial, [(two, large), (one, small)])
    if remembered is not None:
        return Tried(
            LossKind.UNTRIED,
            f"the loss remembers {remembered} and is another the next time: parts of a batch that are computed by"
            " several replicas, or one after the other, do not tell its loss",
            remedy="what it remembers as a variable that the script sets between steps; or dp=1,microbatches=1",
        )
    if whole.number is not None:
        pair = _by_slopes(trial, three, seen, runs, _pair(trial, three, seen, runs))
        return _in_training(trial, three, seen, runs, pair)
    if all(abs(each.total) <= _NOTHING * each.tolerance for each in runs):
        found = _by_slopes(trial, three, seen, runs, Tried(LossKind.ROWS), are_zero=True)
        return found if found.problem is not None else Tried(LossKind.UNTRIED)
    tried = Tried(_kind(*runs), labels=whole.labels, inside=bool(whole.inside), depends=large.total != small.total)
    tried = _with_less(trial, three, seen, runs, tried)
    tried = _by_slopes(trial, three, seen, runs, _spread_out(trial, three, seen, runs, tried))
    return _in_training(trial, three, seen, runs, tried)


def try_backward(
    module: nn.Module, loss: Loss, example: Batch, rule: RowRule, precision: Context, *, for_all: bool = False
) -> Tried:
    """Try only whether backwards of parts add up to that of the whole, for a loss that has to be a pair anyway."""
    seen = rule.look(example)
    tried, three = Tried(LossKind.UNTRIED), three_rows(example, seen)
    try:
        return _of_backward(tried, *Trial(module, loss, precision, at_first=at_first(for_all)).run_in_training(three))
    except Exception:
        return tried


def _of_backward(tried: Tried, whole: Run, bent: str | None) -> Tried:
    tried = tried._replace(writes_none=not whole.writes)
    if whole.has_left:
        return tried._replace(problem=OWN_BACKWARD, remedy=REMEDY_OF_OWN)
    if whole.is_learned:
        return tried._replace(problem=LEARNED_NUMBER, remedy=REMEDY_OF_LEARNED)
    return tried if bent is None else tried._replace(problem=bent, remedy=REMEDY_OF_BENT)


def _spread_out(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried) -> Tried:
    """Try again with the outputs scaled apart: a loss that selects rows by their outputs then selects others."""
    if tried.problem is not None or tried.kind is LossKind.UNTRIED or not _is_small(runs[0].output):
        return tried
    if tried.inside:  # The module computes the loss itself, so other outputs would not change it.
        return tried
    made = runs[0].output, runs[1].output, runs[2].output
    for outputs in (spread(made, factors) for factors in WAYS):
        problem = None if outputs is None else _other_by(trial, three, seen, tried, outputs)
        if problem is not None:
            return tried._replace(problem=f"what counts is decided by outputs: with others {problem}")
    for signals in (spread_signals(three, seen, factors) for factors in SIGNED_WAYS):
        problem = None if signals is None else _other_by(trial, signals, seen, tried, made)
        if problem is not None:
            return tried._replace(problem=f"what counts is decided by numbers of the batch: with others {problem}")
    return tried


def _other_by(trial: Trial, three: Batch, seen: Seen, tried: Tried, outputs: tuple[Any, Any, Any]) -> str | None:
    """Describe how parts with these entries and outputs do not tell the loss of the whole; None if they do."""
    two, one = two_and_one(three, seen)
    try:
        whole, large = trial.run(three, output=outputs[0]), trial.run(two, output=outputs[1])
        now = whole, large, trial.run(one, output=outputs[2])
    except Exception:  # What is scaled may be invalid, for example as probabilities.
        return None
    return mismatch(*now) if is_finite(whole) and not _fits_as(tried, three, seen, now) else None


def _by_slopes(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried, *, are_zero: bool = False) -> Tried:
    """Try again with gradients: a value that is constant for autograd may depend on all rows. `are_zero`: the losses of
    the runs are rounding, which fits nothing."""
    is_told = tried.kind not in (LossKind.UNTRIED, LossKind.BESIDE) and not (tried.apart or tried.inside)
    if (
        tried.problem is not None
        or not is_told
        or not _is_small(runs[0].output)
        or not (are_zero or _fits_as(tried, three, seen, runs))
    ):
        return tried
    try:
        for slopes in slopes_of(trial, (three, *two_and_one(three, seen)), runs):
            if _fits_as(tried, three, seen, slopes):
                continue
            if trial.run(three, seed=1).total != runs[0].total:
                break  # The loss draws at random, so other rows get other draws.
            whole, large, small = (each.total for each in slopes)
            return tried._replace(
                problem=f"parts of a batch have the loss of the whole, but not its gradient: along the outputs of"
                f" {NUM_ROWS} rows it is {whole:.6g}, of {FIRST} of them {large:.6g} and of the other {small:.6g}. A"
                " number of all rows is a constant in it (detach(), item())"
            )
    except Exception:  # The loss has no gradient with respect to its outputs alone.
        return tried
    return tried


def _in_training(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried) -> Tried:
    """Try again in training mode, where rows may interact in the forward, and there is a backward."""
    if tried.problem is not None or tried.kind is LossKind.UNTRIED:
        return tried
    try:
        whole, bent = trial.run_in_training(three)
        tried = _of_backward(tried, whole, bent)
        if tried.problem is not None:
            return tried
        is_same = whole.total == runs[0].total and not whole.gradients
        if is_same or trial.run_in_training(three)[0].total != whole.total:
            return tried  # The same in both modes, or different in every call.
        large, small = (trial.run_in_training(each)[0] for each in two_and_one(three, seen))
        differ = not (are_left_alike(whole, large) and are_left_alike(whole, small))
        if trial.compares_buffers and whole.writes and differ:
            return tried  # The comparison of the buffers of replicas reports this.
    except Exception:  # Training will report what is wrong.
        return tried
    now = whole, large, small
    if any(each.has_drawn for each in now):
        return tried
    if not all(map(is_finite, now)) or (whole.number is not None and not fits(LossKind.SUM, *runs)):
        return tried
    if not _fits_as(tried, three, seen, now):
        return tried._replace(problem=f"in training mode {mismatch(*now)}")
    for name, slopes in by_parameters(now) if tried.kind is not LossKind.BESIDE and not tried.apart else ():
        if not _fits_as(tried, three, seen, slopes):
            return tried._replace(
                problem=f"parts of a batch have the loss of the whole, but not the gradient of {name}: rows see each"
                " other in the backward alone (hooks, an autograd.Function, a number of all rows that is detached)",
                remedy=REMEDY_OF_PARTS,
            )
    return tried


def _fits_as(tried: Tried, three: Batch, seen: Seen, now: Runs) -> bool:
    """Whether other runs fit the kind that was found."""
    if tried.through is not None:
        return fits_through(tried.through, three, seen, now)
    kinds = {LossKind.PAIR: LossKind.SUM, LossKind.EVEN: LossKind.ROWS}
    return fits(kinds.get(tried.kind, tried.kind), *now)


def _with_less(trial: Trial, three: Batch, seen: Seen, runs: Runs, tried: Tried) -> Tried:
    """Try again with values hidden by masks and with ignored labels."""
    kind, all_at_once = tried.kind, None
    if kind is not LossKind.UNTRIED:
        all_at_once = trial.less(with_hidden(three, seen, 0), seen, runs, 1.0)
        others: list[Runs | None] = []
        if not tried.inside and _is_small(runs[0].output):
            values = (*MARKS, *(UNKNOWN if has_fractions(three, seen) else ()))
            others = [trial.less(with_hidden(three, seen, each), seen, runs, again=False) for each in values]
            others += with_numbers(trial, three, seen, runs)
        others += [
            trial.less(with_hidden(three, seen, value, path), seen, runs, within=IndexCheck)
            for path, value in ways_to_hide(three, seen)
            if are_inside(trial, path, value, runs)
        ]
        if all_at_once is not None and all(each is None or fits(kind, *each) for each in (all_at_once, *others)):
            return tried
    found = find_entry(trial, three, seen, runs, tried)
    if found is not None:
        return found
    if kind is LossKind.UNTRIED:
        is_random = trial.run(three, seed=1).total != runs[0].total
        if is_random:
            return tried
        if any(each.has_drawn for each in runs):
            return tried._replace(kind=LossKind.ROWS, problem=f"{mismatch(*runs)}{DRAWN}", remedy=REMEDY_OF_DRAWN)
        where = first_across(trial.module, trial.run, three, two_and_one(three, seen)[1], runs[0].tolerance)
        remedy = REMEDY_OF_MEANS if where == THE_LOSS else REMEDY
        problem = f"{mismatch(*runs)} (rows see each other in {where})"
        return tried._replace(kind=LossKind.ROWS, problem=problem, remedy=remedy)
    if all_at_once is None or count_the_same(trial, three, seen, runs, tried):
        return tried
    if runs[0].counts and fits(LossKind.ROWS, *runs):
        return tried._replace(kind=LossKind.EVEN, of_rows=len({len(each.counts) for each in runs}) > 1)
    return tried._replace(
        problem="the loss is a mean over labels that are not ignored, and something else: parts of a batch that ignore"
        " some do not tell its loss",
        remedy=REMEDY_OF_MEANS,
    )


def _kind(whole: Run, large: Run, small: Run) -> LossKind:
    is_counted = len(whole.counts) == len(large.counts) == len(small.counts) == 1
    kinds = (*([LossKind.LABELS] if is_counted else []), LossKind.ROWS, LossKind.SUM)
    return next((kind for kind in kinds if fits(kind, whole, large, small)), LossKind.UNTRIED)


def _pair(trial: Trial, three: Batch, seen: Seen, runs: Runs) -> Tried:
    """Try a pair of a sum and its number. The number may be a constant such as 1. If it adds up, the sum has to."""
    whole, large, small = runs
    number, first, other = (each.number or 0.0 for each in runs)
    adds_up = abs(number - first - other) <= whole.tolerance * abs(number)
    if not adds_up or not number or fits(LossKind.SUM, *runs):
        return Tried(LossKind.PAIR, apart=not adds_up)
    told = (
        f"the loss is a pair of {whole.total:.6g} and {number:g} for {NUM_ROWS} rows, but the first is %s: for"
        f" {FIRST} and 1 of them it is {large.total:.6g} and {small.total:.6g}"
    )
    if is_mean(first, other, *runs):
        return Tried(LossKind.PAIR, told % "a mean and no sum")
    if trial.meets or trial.run(three, seed=1).total != whole.total:
        return Tried(LossKind.PAIR)
    two, one = two_and_one(three, seen)
    outputs = [with_numbers_of(whole.output, each.output) for each in (large, small)]
    if fits(LossKind.SUM, whole, trial.run(two, output=outputs[0]), trial.run(one, output=outputs[1])):
        return Tried(LossKind.BESIDE)
    where = first_across(trial.module, trial.run, three, one, whole.tolerance)
    return Tried(LossKind.PAIR, told % f"no sum over rows, which see each other in {where}", remedy=REMEDY_OF_PARTS)


def _is_small(output: Any) -> bool:
    return sum(each.numel() for each in tensors_in({"": output})) <= _MOST_ON_HOST
