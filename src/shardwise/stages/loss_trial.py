"""A user's loss tried with numbers: what it is a mean over, if it is one.

A plan computes it on parts of a batch, and adds up. That is the loss of the whole only if the parts are weighed by what
it is a mean over. So it is tried on three rows, on two of them and on one, in evaluation mode:

    loss of 3 = (2 * loss of 2 + 1 * loss of 1) / 3          a mean over rows: parts weigh as much as they have rows
    loss of 3 = loss of 2 + loss of 1                        a sum: parts are added, and not divided
    the first, weighed by labels that are not ignored        a mean over labels: parts weigh as much as they have labels
    the first, weighed by what an entry lets through         a mean by a mask: parts weigh as much as it adds up to
    none of them                                             refused

And once more with masks that hide some of two rows, and labels that are ignored there: what is a mean over rows only
while nothing is hidden would go wrong unseen with a later batch. And in training mode, where nothing is drawn
(`steady_draws.py`): a forward may do something else there, and its backward may not be in proportion
(`backward_trial.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import some
from shardwise.stages.backward_trial import NOT_IN_PROPORTION, SeenHooks, find_bent
from shardwise.stages.full_precision import full_precision
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.loss_kind import LEARNED_NUMBER, REMEDY_OF_LEARNED, LossKind, Through, Tried
from shardwise.stages.metrics import take_metrics
from shardwise.stages.rows import RowRule, Seen, changed, nodes, take_rows, tensors_in
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.python_state import PythonState, draws_digest
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.split.switch import undisturbed
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import steady
from shardwise.torch_private import RunningNormModule

_NUM_ROWS = 3
_FIRST = 2
#: The label that torch's losses ignore.
_IGNORED = -100
#: Outputs of more numbers are not tried on the host.
_MOST_ON_HOST = 2**27

#: What a trial is run in.
Context = Callable[[], AbstractContextManager[Any]]


def try_loss(
    module: nn.Module,
    loss: Loss,
    example: Batch,
    rule: RowRule,
    precision: Context = nullcontext,
) -> Tried:
    """Find out what a loss is, from a few rows of an example that the module can compute."""
    seen = rule.look(example)
    trial = _Trial(module, loss, precision)
    first = _outcome(trial, _three(example, seen), seen)
    if first.problem is None and first.kind is not LossKind.UNTRIED:
        return first
    # Perhaps something is as long as the batch by chance, and no part of the rows.
    for path in sorted(seen.paths):
        fewer = Seen(seen.length, seen.paths - {path})
        if fewer.paths:
            found = _outcome(trial, _three(example, fewer), fewer)
            if found.problem is not None or not found.depends:
                continue
            if first.failed:  # With a part of it nothing can be computed at all.
                return found._replace(tables=(path,))
            remedy = f"batch[{path!r}] = sw.whole(batch[{path!r}]) if it has no entry for each row; else {first.remedy}"
            return first._replace(remedy=remedy)
    return first


class _Run(NamedTuple):
    """One number of the loss, the number that it is over if it was told, and the means over labels that were seen."""

    total: float
    number: float | None
    counts: list[float]
    inside: int
    labels: int
    tolerance: float
    output: Any
    #: Of a run with gradients: whether its number has one too.
    is_learned: bool = False
    #: Whether the forward wrote to buffers: what then comes of parts is told by who compares these.
    writes: bool = False
    #: Whether Python's or NumPy's generators were drawn from: other rows may draw something else.
    has_drawn: bool = False


_Runs = tuple[_Run, _Run, _Run]


class _Trial:
    def __init__(self, module: nn.Module, loss: Loss, precision: Context) -> None:
        self._module, self._loss, self._precision = module, loss, precision
        self._signature = Signature(module)
        #: What was there before the first run in evaluation mode. In training mode each run has hooks of its own.
        self._state: PythonState | None = None

    def run_in_training(self, batch: Batch) -> tuple[_Run, str | None]:
        """The same in training mode; and what in the backward is not in proportion to the gradient it begins with.

        Batch norms are as in evaluation: that each normalises its own rows is known.
        """
        bent: list[str | None] = []
        hooks = SeenHooks()
        with steady(), hooks:
            found = self.run(
                batch, training=True, look=lambda total: bent.append(find_bent(self._module, total, hooks))
            )
        return found._replace(output=None), bent[0]

    def run(
        self, batch: Batch, ignored: float = 0.0, *, seed: int = 0, output: Any = None, training: bool = False,
        look: Callable[[Tensor], None] | None = None,
    ) -> _Run:  # fmt: skip
        """The loss of a batch; of an `output` that is given, or else computed. `look` is given it with its graph."""
        were_training = [each for each in self._module.modules() if each.training]
        counts = LabelCounts(ignored)
        for each in self._module.modules():
            each.training = each.training and training and not isinstance(each, RunningNormModule)
        before = [(each, each.clone()) for each in self._module.buffers()] if training else []
        try:
            with (
                undisturbed(self._module, {}, self._loss, state=None if training else self._state) as switch,
                full_precision(),
                self._precision(),
                torch.set_grad_enabled(training),
                counts,
            ):
                self._state = self._state if training else switch.state
                seed_torch(seed)
                drawn = draws_digest()
                is_rounded = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
                if output is None:
                    args, kwargs = self._signature.arguments(batch)
                    output = self._module(*args, **kwargs)
                inside = len(counts.found)
                result, _ = take_metrics(self._loss(output, batch))
                has_drawn = draws_digest() != drawn
                if look is not None:
                    look(result[0] if isinstance(result, tuple) else result)
                writes = [*map(id, self._module.buffers())] != [id(each) for each, _ in before] or any(
                    not torch.equal(each, value) for each, value in before
                )
        finally:
            for each in were_training:
                each.training = True
        total, number = result if isinstance(result, tuple) else (result, None)
        # A GPU has another kernel for another number of rows, which adds up in another order.
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4 if total.is_cuda else 1e-5}.get(total.dtype, 1e-2)
        if is_rounded or any(each.dtype in (torch.bfloat16, torch.float16) for each in self._module.parameters()):
            tolerance = 1e-2
        return _Run(
            float(total.detach()), None if number is None else float(torch.as_tensor(number).detach()),
            [float(each.number) for each in counts.found], inside,
            max(1, counts.found[0].size // _NUM_ROWS) if counts.found else 1, tolerance, output,
            isinstance(number, Tensor) and number.requires_grad, training and writes, has_drawn,
        )  # fmt: skip

    def less(self, hidden: Batch, seen: Seen, runs: _Runs, ignored: float = 0.0, *, again: bool = True) -> _Runs | None:
        """The same where some of two rows is hidden; None if the module or the loss does not take that.

        Without `again` the loss alone is given it, on the host: what is out of range there raises, and no GPU is lost.
        """
        two = _parts(hidden, seen)[0]
        try:
            if again:
                made = self.run(hidden, ignored / _NUM_ROWS), self.run(two, ignored / _FIRST), runs[2]
            else:
                outputs = [_on_host(each.output) for each in runs]
                hosted = [_on_host(each) for each in (hidden, two)]
                made = self.run(hosted[0], output=outputs[0]), self.run(hosted[1], output=outputs[1]), runs[2]
        except Exception:
            return None
        return made if all(map(_is_finite, made)) else None

    @torch.no_grad()
    def remembers(self, before: tuple[Batch, _Run], then: tuple[Batch, _Run]) -> str | None:
        """What the loss leaves behind for its next call, if that is another for it."""
        kept = PythonState(self._loss)
        try:
            with undisturbed(self._module, {}, self._loss), self._precision():
                at_first = self._total(*then)
                kept.restore()
                self._total(*before)
                changed = kept.changed()
                later = self._total(*then)
        except Exception:  # It reads what a forward leaves for it, and there is none here.
            return None
        if not changed or abs(later - at_first) <= then[1].tolerance * abs(at_first):
            return None
        return some([f"{name} ({words})" for name, words in changed.items()])

    def _total(self, batch: Batch, run: _Run) -> float:
        seed_torch(0)
        result, _ = take_metrics(self._loss(run.output, batch))
        return float(result[0] if isinstance(result, tuple) else result)


def _outcome(trial: _Trial, three: Batch, seen: Seen) -> Tried:
    two, one = _parts(three, seen)
    try:
        runs = whole, large, small = trial.run(three), trial.run(two), trial.run(one)
    except Exception:  # Whoever runs the whole example says what is wrong, if it is.
        return Tried(LossKind.UNTRIED, failed=True)
    if not all(map(_is_finite, runs)):
        # What is finite for all rows and not for some of them is divided by something that these lack.
        return Tried(LossKind.UNTRIED, _mismatch(*runs) if _is_finite(whole) else None)
    remembered = trial.remembers((two, large), (one, small))
    if remembered is not None:
        return Tried(
            LossKind.UNTRIED,
            f"the loss remembers {remembered} and is another the next time: parts of a batch that are computed by"
            " several replicas, or one after the other, do not tell its loss",
            remedy="what it remembers as a variable that the script sets between steps; or dp=1,microbatches=1",
        )
    if whole.number is not None:
        return _in_training(trial, three, seen, runs, _pair(whole, large, small))
    if not any(each.total for each in runs):
        return Tried(LossKind.UNTRIED)
    tried = Tried(_kind(*runs), labels=whole.labels, inside=bool(whole.inside), depends=large.total != small.total)
    return _in_training(trial, three, seen, runs, _with_less(trial, three, seen, runs, tried))


def try_backward(module: nn.Module, loss: Loss, example: Batch, rule: RowRule, precision: Context) -> Tried:
    """Only whether backwards of parts can be those of the whole: for a loss that has to be a pair anyway."""
    seen = rule.look(example)
    tried, three = Tried(LossKind.UNTRIED), _three(example, seen)
    try:
        return _of_backward(tried, *_Trial(module, loss, precision).run_in_training(three))
    except Exception:
        return tried


def _of_backward(tried: Tried, whole: _Run, bent: str | None) -> Tried:
    if whole.is_learned:
        return tried._replace(problem=LEARNED_NUMBER, remedy=REMEDY_OF_LEARNED)
    return tried if bent is None else tried._replace(problem=bent, remedy=NOT_IN_PROPORTION)


def _in_training(trial: _Trial, three: Batch, seen: Seen, runs: _Runs, tried: Tried) -> Tried:
    """The same in training mode, where the forward may see more than its own rows, and there is a backward."""
    if tried.problem is not None or tried.kind is LossKind.UNTRIED:
        return tried
    try:
        whole, bent = trial.run_in_training(three)
        tried = _of_backward(tried, whole, bent)
        if tried.problem is not None:
            return tried
        if whole.writes or whole.total == runs[0].total or trial.run_in_training(three)[0].total != whole.total:
            return tried  # It does the same in both modes, or something else whenever it is called.
        large, small = (trial.run_in_training(each)[0] for each in _parts(three, seen))
    except Exception:  # Whoever trains says what is wrong.
        return tried
    now = whole, large, small
    if any(each.has_drawn for each in now):
        return tried
    if not all(map(_is_finite, now)) or (tried.kind is LossKind.PAIR and not _fits(LossKind.SUM, *runs)):
        return tried
    if tried.through is not None:
        fits = _fits_by(*_weights(tried.through, three, seen), *now)
    else:
        kinds = {LossKind.PAIR: LossKind.SUM, LossKind.EVEN: LossKind.ROWS}
        fits = _fits(kinds.get(tried.kind, tried.kind), *now)
    return tried if fits else tried._replace(problem=f"in training mode {_mismatch(*now)}")


def _with_less(trial: _Trial, three: Batch, seen: Seen, runs: _Runs, tried: Tried) -> Tried:
    """The same once masks hide something, and labels are ignored."""
    kind, all_at_once = tried.kind, None
    if kind is not LossKind.UNTRIED:
        all_at_once = trial.less(_hidden(three, seen, 0), seen, runs, 1.0)
        ignoring = None
        if not tried.inside and _is_small(runs[0].output):
            ignoring = trial.less(_hidden(three, seen, _IGNORED), seen, runs, again=False)
        if all_at_once is not None and all(each is None or _fits(kind, *each) for each in (all_at_once, ignoring)):
            return tried
    found = _find_entry(trial, three, seen, runs, tried)
    if found is not None:
        return found
    if kind is LossKind.UNTRIED:
        is_random = trial.run(three, seed=1).total != runs[0].total
        return tried if is_random else tried._replace(kind=LossKind.ROWS, problem=_mismatch(*runs))
    if all_at_once is None:
        return tried
    if runs[0].counts and _fits(LossKind.ROWS, *runs):
        return tried._replace(kind=LossKind.EVEN)
    return tried._replace(
        problem="the loss is a mean over labels that are not ignored, and something else: parts of a batch that ignore"
        " some do not tell its loss"
    )


def _kind(whole: _Run, large: _Run, small: _Run) -> LossKind:
    is_counted = len(whole.counts) == len(large.counts) == len(small.counts) == 1
    kinds = (*([LossKind.LABELS] if is_counted else []), LossKind.ROWS, LossKind.SUM)
    return next((kind for kind in kinds if _fits(kind, whole, large, small)), LossKind.UNTRIED)


def _fits(kind: LossKind, whole: _Run, large: _Run, small: _Run) -> bool:
    if kind is LossKind.SUM:
        return _fits_by(1, 1, whole._replace(total=whole.total / 2), large, small)
    weight, other = (large.counts[0], small.counts[0]) if kind is LossKind.LABELS else (_FIRST, 1)
    return _fits_by(weight, other, whole, large, small)


def _pair(whole: _Run, large: _Run, small: _Run) -> Tried:
    """A sum and its number. The number may be anything that is meant, 1 say; a mean beside one that adds up is none."""
    number, first, other = (each.number or 0.0 for each in (whole, large, small))
    adds_up = abs(number - first - other) <= whole.tolerance * abs(number)
    if not adds_up or not number or _fits(LossKind.SUM, whole, large, small):
        return Tried(LossKind.PAIR)
    # Something else than a sum may be meant, of all replicas together; a mean, or one over labels, is not.
    if not whole.counts and not _fits_by(first, other, whole, large, small):
        return Tried(LossKind.PAIR)
    return Tried(
        LossKind.PAIR,
        f"the loss is a pair of {whole.total:.6g} and {number:g} for {_NUM_ROWS} rows, but the first is a mean and no"
        f" sum: for {_FIRST} and 1 of them it is {large.total:.6g} and {small.total:.6g}",
    )


def _mismatch(whole: _Run, large: _Run, small: _Run) -> str:
    return (
        f"the loss of {_NUM_ROWS} rows is {whole.total:.6g}, of {_FIRST} of them {large.total:.6g} and of the other"
        f" {small.total:.6g}: it is neither their mean by rows nor their sum, so parts of a batch do not tell its loss"
    )


def _find_entry(trial: _Trial, three: Batch, seen: Seen, runs: _Runs, tried: Tried) -> Tried | None:
    """Which entry the loss is a mean over: parts are weighed by it, if that tells the loss of the whole."""
    for path, value in _ways_to_hide(three, seen):
        hidden = _hidden(three, seen, value, path)
        less = trial.less(hidden, seen, runs, again=value != _IGNORED)
        if less is None or (tried.kind is not LossKind.UNTRIED and _fits(tried.kind, *less)):
            continue
        if less[0].counts != runs[0].counts and tried.kind is not LossKind.UNTRIED:
            continue  # It is torch's mean over labels that ignores them, which is counted in every batch.
        row = next(int(each.numel()) for here, each in nodes(three) if here == path) // _NUM_ROWS
        for first in (0, 1):
            through = Through(path, first, value, max(1, row))
            # Few tokens fit by chance: so it is hidden in another way as well.
            other = _hidden(three, seen, value, path, rows=1)
            lesser = trial.less(other, seen, runs, again=value != _IGNORED)
            cases = ((three, runs), (hidden, less), (other, lesser))
            if all(each is None or _fits_by(*_weights(through, batch, seen), *each) for batch, each in cases):
                return tried._replace(kind=LossKind.ENTRY, through=through)
        if tried.kind is not LossKind.UNTRIED:
            whole, large, small = (each.total for each in less)
            return tried._replace(
                problem=f"the loss is divided by something that {path} decides: with {value or 0} for some of it in"
                f" {_FIRST} rows, the loss of {_NUM_ROWS} rows is {whole:.6g}, and not the mean of {large:.6g} and"
                f" {small:.6g} by rows, so parts of a batch do not tell its loss"
            )
    return None


def _ways_to_hide(three: Batch, seen: Seen) -> Iterator[tuple[str, int | None]]:
    for path, value in nodes(three):
        if path in seen.paths and isinstance(value, Tensor):
            yield from [(path, None)] if _is_mask(value) or value.is_floating_point() else [(path, 0), (path, _IGNORED)]


def _weights(through: Through, three: Batch, seen: Seen) -> tuple[float, float]:
    two, one = _parts(three, seen)
    return float(through.of(two)), float(through.of(one))


def _fits_by(weight: float, other: float, whole: _Run, large: _Run, small: _Run) -> bool:
    if not weight + other:
        return False
    wanted = (weight * large.total + other * small.total) / (weight + other)
    return abs(whole.total - wanted) <= whole.tolerance * max(abs(each.total) for each in (whole, large, small))


def _is_finite(run: _Run) -> bool:
    return abs(run.total) < float("inf")


def _three(example: Batch, seen: Seen) -> Batch:
    """Three rows of an example, the last again if there are fewer."""
    places = [min(number, seen.length - 1) for number in range(_NUM_ROWS)]

    def take(path: str, value: Any) -> Any:
        if path not in seen.paths:
            return None
        if isinstance(value, Tensor):
            return value[torch.tensor(places, device=value.device)]
        return type(value)(value[each] for each in places) if isinstance(value, (list, tuple)) else value[places]

    plain = take_rows(example, seen, 0, seen.length)
    return changed(plain, take)  # type: ignore[no-any-return]


def _parts(three: Batch, seen: Seen) -> tuple[Batch, Batch]:
    return take_rows(three, seen, 0, _FIRST), take_rows(three, seen, _FIRST, _NUM_ROWS)


def _hidden(three: Batch, seen: Seen, value: int | None, only: str | None = None, *, rows: int = _FIRST) -> Batch:
    """The same with masks and weights that let less of some rows through, and `value` for some whole numbers there."""

    def hide(path: str, given: Any) -> Any:
        if path not in seen.paths or not isinstance(given, Tensor) or (only is not None and path != only):
            return None
        is_mask = _is_mask(given)
        if given.is_complex() or (value == _IGNORED and (is_mask or given.is_floating_point())):
            return None
        made = given.clone()
        if given.is_floating_point() and not is_mask:
            made[0] = made[0] * 0.25
        elif given.dim() > 1:
            half = (given.shape[-1] + 1) // 2
            made[:rows, ..., slice(half, None) if rows > 1 else slice(half)] = 0 if is_mask else value or 0
        else:
            made[0] = 0 if is_mask else value or 0
        return made

    return changed(three, hide)  # type: ignore[no-any-return]


def _is_mask(value: Tensor) -> bool:
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())


def _is_small(output: Any) -> bool:
    return sum(each.numel() for each in tensors_in({"": output})) <= _MOST_ON_HOST


def _on_host(value: Any) -> Any:
    return changed({"": value}, lambda _, each: each.cpu() if isinstance(each, Tensor) else None)[""]
