"""Find rows that meet in a forward or a loss that draws random numbers: parts of a batch draw others, so that their
losses tell nothing about the whole.

Runs of as many rows draw the same from the same seed, so only these are compared. In a sum over rows a, b, c it makes
no difference to one row which numbers another one has:

    loss(a, b, c) - loss(b, b, c) = loss(a, b, a) - loss(b, b, a)

    h = lam * h + (1 - lam) * h[torch.randperm(len(h))]        rows that are mixed
    negatives = items[torch.randint(len(items), ...)]          rows that are drawn
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.stages.batch import picked
from shardwise.stages.checkpoints import nothing_recomputed
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.rows import Seen
from shardwise.stages.split.python_draws import draws_digest, seed_python
from shardwise.stages.stage import Batch
from shardwise.stages.steady_draws import SteadyDraws, SteadyDropout, sets_seed
from shardwise.stages.trial_rows import NUM_ROWS
from shardwise.stages.trial_run import Run, Trial, is_finite
from shardwise.stages.whole_step import generators

#: For each two of three rows: the rows in place of them, with none of the two exchanged, one, the other, and both.
_EXCHANGES = (
    ((0, 1, 2), (1, 1, 2), (0, 1, 1), (1, 1, 1)),
    ((0, 1, 2), (2, 1, 2), (0, 2, 2), (2, 2, 2)),
    ((0, 1, 2), (0, 0, 2), (0, 1, 0), (0, 0, 0)),
)
#: Another seed draws another order of the rows.
_SEEDS = (0, 1, 2)
#: The factor on the tolerance: losses are subtracted from each other.
_SLACK = 10.0


def find_met(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> Tried:
    """Return the finding of a loss, with a problem if something but dropout is drawn and rows meet."""
    if tried.problem is not None or tried.failed or tried.apart or trial.meets or tried.kind is LossKind.BESIDE:
        return tried
    try:
        # Another trial: this one may have draws of its own.
        problem = _of_rows(trial.again(), three, seen, tried) if _draws(trial, three) else None
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return tried
    return tried if problem is None else tried._replace(problem=problem)


def _draws(trial: Trial, three: Batch) -> bool:
    """Whether training draws anything but dropout. A forward that sets its seed is none of these: it is refused."""
    if sets_seed(trial.module):
        return False
    steady = SteadyDraws()

    @contextmanager
    def within() -> Iterator[None]:
        with nothing_recomputed(), SteadyDropout(), steady:
            yield

    found = trial.again().run(three, training=True, within=within)
    return steady.has_drawn or found.has_drawn


def _of_rows(trial: Trial, three: Batch, seen: Seen, tried: Tried) -> str | None:
    for seed in _SEEDS:
        runs = _Runs(trial, three, Seen(NUM_ROWS, seen.paths), tried, seed)
        for places in _EXCHANGES:
            neither, one, other, both = map(runs.value, places)
            if any(each != runs.drawn[0] for each in runs.drawn):
                return None  # What is drawn depends on the rows.
            far = abs(neither - one - other + both)
            if not far <= _SLACK * runs.tolerance:
                return (
                    "rows of a batch meet where random numbers are drawn (they are mixed, or compared with drawn ones):"
                    f" with the same draws, what one of {NUM_ROWS} rows adds to the loss depends on another, by"
                    f" {far:.3g}, so parts of a batch do not tell its loss"
                )
    return None


class _Runs:
    """Losses of rows in place of others, as sums over rows, all with the draws of one seed."""

    def __init__(self, trial: Trial, three: Batch, rows: Seen, tried: Tried, seed: int) -> None:
        self._trial, self._three, self._rows, self._tried, self._seed = trial, three, rows, tried, seed
        self._known: dict[Sequence[int], float] = {}
        #: The states of all generators after each run.
        self.drawn: list[list[Any]] = []
        self.tolerance = 0.0

    def value(self, places: Sequence[int]) -> float:
        if places not in self._known:
            batch = picked(self._three, self._rows, places)
            run = self._trial.run(batch, seed=self._seed, training=True, within=self._seeded, look=self._note)
            self._known[places] = _summed(run, batch, self._tried)
            self.tolerance = max(self.tolerance, run.tolerance * abs(self._known[places]))
        return self._known[places]

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed Python and NumPy too: as the script left them, an order that they draw may be that of the rows."""
        seed_python(self._seed)
        with nothing_recomputed():
            yield

    def _note(self, *_: Any) -> None:
        self.drawn.append([*map(Tensor.tolist, generators()), draws_digest()])


def _summed(run: Run, batch: Batch, tried: Tried) -> float:
    """Return the loss as a sum over rows, if it is a mean over something that they decide."""
    if not is_finite(run):
        raise ArithmeticError
    if run.number is not None:
        return run.total
    if tried.through is not None:
        return run.total * float(tried.through.of(batch))
    return run.total * run.counts[0] if len(run.counts) == 1 else run.total
