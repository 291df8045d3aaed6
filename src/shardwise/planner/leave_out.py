"""Leave-one-out error: each source is predicted with constants that were fitted on all other sources.

Logarithms of constants are fitted by robust least squares from priors. Priors are values of data sheets and papers or
plain guesses, never fitted values, so a constant that no other source determines stays at its prior. Constants outside
`PRIORS` matter little, and keep their fit on all rows. One linearisation serves all sources. The source that is left
out is then predicted without linearisation, with the constants of the others.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.planner.runs import Run
from shardwise.planner.validate import Prediction, is_apart, predict_all
from shardwise.working import working_at

#: The constants that matter most, with the values that one would choose without any of these rows: published shares of
#: the best matmul and of links (facts 2.3, 3.2), FlashAttention 2's share on Hopper, a launch of 5 microseconds.
PRIORS = {
    "sustained_ampere": 0.9,
    "sustained_hopper": 0.85,
    "sustained_blackwell": 0.8,
    "sustained_cdna": 0.8,
    "narrow_fp8": 1.0,
    "narrow_mxfp8": 1.0,
    "grouped": 0.5,
    "fast_grouped": 0.6,
    "streaming": 0.85,
    "unfused": 1.3,
    "flash_on_hopper": 0.6,
    "sync_rate": 0.8,
    "exchange_rate": 0.6,
    "dispatch_rate": 1.0,
    "fast_dispatch_rate": 1.0,
    "tp_hidden": 0.5,
    "expert_launch_seconds": 10e-6,
    "routing_kernels": 100.0,
    "fast_routing": 0.5,
    "gather_rate": 0.8,
    "overlap_loss": 0.38,
}
# Standard deviations in logarithms: of a constant from its prior, and of a step from its prediction. Constants that are
# measured in isolation, with one matmul or one copy at a time, are known better than guesses.
_PRIOR_WIDTH, _ERROR = 0.25, 0.06
_MEASURED_WIDTH = 0.05
_MEASURED = ("sustained_ampere", "sustained_hopper", "sustained_blackwell", "streaming")
# The same for a common offset of all rows of a source (the spread of sources that were left out).
_OFFSET_WIDTH = 0.15
# Rows of a source that a fit uses: more rows of one kind add no information.
_MOST_ROWS = 8
_DIFFERENCE = 0.05
_ROUNDS = 12


def leave_out(runs: Sequence[Run]) -> dict[str, list[Prediction]]:
    """Return predictions of each source with constants that were fitted without it."""
    sources: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if not is_apart(run):
            sources[run.source].append(run)
    names, base, slopes, owners = _linearised(sources)
    found = {}
    for number, (source, own) in enumerate(sorted(sources.items())):
        working_at("sources left out", number, len(sources))
        chosen = owners != source
        steps = _fit(names, base[chosen], slopes[chosen], owners[chosen])
        found[source] = predict_all(own, _moved(names, steps))[0]
    return found


def _start() -> Constants:
    return replace(CONSTANTS, **PRIORS)


def _moved(names: Sequence[str], steps: np.ndarray) -> Constants:
    start = _start()
    return replace(
        start, **{name: getattr(start, name) * float(np.exp(by)) for name, by in zip(names, steps, strict=True)}
    )


def _linearised(sources: dict[str, list[Run]]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return log errors at the priors, their derivatives by each constant, and the source of each row."""
    sample, start = [], _start()
    for _, own in sorted(sources.items()):
        timed = [run for run in own if run.text("step_seconds")]
        sample += timed[:: max(len(timed) // _MOST_ROWS, 1)][:_MOST_ROWS]
    before = {each.run.name: each for each in predict_all(sample, start)[0] if each.run.step_seconds}
    kept = [each.run for each in before.values()]
    base = np.array([np.log(each.seconds / (each.run.step_seconds or 1.0)) for each in before.values()])
    columns = []
    for number, name in enumerate(PRIORS):
        working_at("what each constant changes", number, len(PRIORS))
        changed = replace(start, **{name: getattr(start, name) * float(np.exp(_DIFFERENCE))})
        after = predict_all(kept, changed)[0]
        columns.append([np.log(one.seconds / before[one.run.name].seconds) / _DIFFERENCE for one in after])
    return list(PRIORS), base, np.array(columns).T, np.array([run.source for run in kept])


def _fit(names: Sequence[str], base: np.ndarray, slopes: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return steps of the constants' logarithms that minimise absolute errors. Each source has the same weight.

    Errors of one source are correlated: one machine, one clock, one way to measure. An offset of each source absorbs
    their common part, so that an outlying source moves constants little. No prediction uses these offsets.
    """
    sources = sorted(set(owners))
    member = np.array([[float(owner == source) for source in sources] for owner in owners])
    fair = (member @ (1.0 / np.sqrt(member.sum(axis=0)))) * np.sqrt(_MOST_ROWS)
    columns = np.hstack([slopes, member])
    known = [_MEASURED_WIDTH if name in _MEASURED else _PRIOR_WIDTH for name in names]
    widths = np.array([*known, *[_OFFSET_WIDTH] * len(sources)])
    steps = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        left = base + columns @ steps
        weight = fair / (_ERROR * np.maximum(np.abs(left), _ERROR / 2))
        steps = np.linalg.solve(
            columns.T @ (weight[:, None] * columns) + np.diag(1.0 / widths**2), -columns.T @ (weight * base)
        )
    return np.clip(steps[: slopes.shape[1]], -1.0, 1.0)
