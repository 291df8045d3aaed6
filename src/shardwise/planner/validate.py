"""Predictions against published measurements: step time, memory, out-of-memory failures, and rankings of layouts."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.layouts import RECOMPUTE
from shardwise.cost.step import Estimate, price
from shardwise.errors import ShardwiseError
from shardwise.planner.runs import Run, SkippedError, layouts_of, pool_of
from shardwise.planner.stated import balance_of, expert_ranks_of, model_of, software_of

# Our choice in a sweep counts as good if its measured time is within this share of the best.
_CLOSE = 0.03
_LEAST_OF_A_SWEEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run and its prediction. `peak_bytes` is counted on the same basis as the row's own peak."""

    run: Run
    seconds: float
    low: float
    high: float
    peak_bytes: float
    fits: bool
    parts: Mapping[str, float]

    @property
    def time_error(self) -> float | None:
        """Predicted over measured time, minus one."""
        return None if self.run.step_seconds is None else self.seconds / self.run.step_seconds - 1.0

    @property
    def memory_error(self) -> float | None:
        return None if self.run.peak_gib is None else self.peak_bytes / 2**30 / self.run.peak_gib - 1.0


def predict(run: Run, constants: Constants = CONSTANTS) -> Prediction:
    """Predict one run from its row. Raise `SkippedError` if the row lacks information."""
    for measured in ("step_seconds", "peak_gib"):
        run.number(measured)  # Read measurements first, so that a bad one skips the whole row.
    try:
        cluster, model = Cluster(pools=(pool_of(run),)), model_of(run)
        balance, software, sequence = balance_of(run), software_of(run), run.count("sequence")
        ep = expert_ranks_of(run, model)

        def priced(recompute: str | None = None) -> Estimate:
            layouts = layouts_of(run, balance=balance, recompute=recompute, ep=ep)
            return price(model, cluster, layouts, sequence=sequence, software=software, constants=constants)

        found = priced()
        fits = bool(found.fits[0])
        if not fits and not run.text("recompute"):
            # The row does not state recomputation: the run fits if it does with any choice.
            fits = any(priced(choice).fits[0] for choice in RECOMPUTE)
    except ShardwiseError as error:
        raise SkippedError(error.problem) from None
    return Prediction(
        run=run,
        seconds=float(found.seconds[0]),
        low=float(found.low[0]),
        high=float(found.high[0]),
        peak_bytes=_counted(run, found),
        fits=fits,
        parts={name: float(part[0]) for name, part in found.parts.items()},
    )


def _counted(run: Run, found: Estimate) -> float:
    """Return the bytes of the fullest rank on the row's basis: all (nvidia-smi), reserved, or allocated."""
    basis, held = run.text("peak_basis"), found.bytes
    counted = held.peak if "nvidia-smi" in basis else held.reserved if "max_reserved" in basis else held.allocated
    return float(counted[0])


def predict_all(
    runs: Iterable[Run], constants: Constants = CONSTANTS
) -> tuple[list[Prediction], list[tuple[Run, str]]]:
    """Predict each run. Return also the runs that cannot be predicted, each with the reason."""
    predictions: list[Prediction] = []
    skipped: list[tuple[Run, str]] = []
    for run in runs:
        try:
            predictions.append(predict(run, constants))
        except SkippedError as why:
            skipped.append((run, str(why)))
    return predictions, skipped


def summarise(runs: Sequence[Run], constants: Constants = CONSTANTS) -> dict[str, object]:
    """Return everything that `shardwise validate --json` prints."""
    predictions, skipped = predict_all(runs, constants)
    scored = [each for each in predictions if not is_apart(each.run)]
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for each in scored:
        sources[each.run.source].append(each)
    return {
        "rows": len(runs),
        "timed": sum(each.time_error is not None for each in scored),
        "time": _errors(scored),
        "memory": _errors(scored, memory=True),
        "oom": _out_of_memory(scored),
        "ranking": _ranking(scored),
        "inside_interval": _inside(scored),
        "by_source": {name: _of_source(of_source) for name, of_source in sorted(sources.items())},
        "apart": _errors([each for each in predictions if is_apart(each.run)]),
        "skipped": [{"id": run.name, "why": why} for run, why in skipped],
    }


def summarise_left_out(found: Mapping[str, Sequence[Prediction]]) -> dict[str, object]:
    """Return the same figures for predictions by source, and their mean over sources with equal weights."""
    scored = [each for own in found.values() for each in own]
    of_sources = {name: _of_source(own) for name, own in sorted(found.items())}
    means = [float(np.mean(errors)) for own in found.values() if (errors := _sizes(own))]
    return {
        "rows": len(scored),
        "time": _errors(scored),
        "memory": _errors(scored, memory=True),
        "oom": _out_of_memory(scored),
        "inside_interval": _inside(scored),
        "mean_over_sources": float(np.mean(means)) if means else None,
        "by_source": of_sources,
    }


def _sizes(predictions: Sequence[Prediction]) -> list[float]:
    return [abs(each.time_error) for each in predictions if each.time_error is not None]


def is_apart(run: Run) -> bool:
    """Return whether a row is scored apart (NOTES.md): ZeRO-3 of 2021, or memory from a formula, not measured."""
    return (run.source == "sc21" and run.text("data_parallel") == "zero3") or run.source == "korthmem"


def _of_source(predictions: Sequence[Prediction]) -> dict[str, object]:
    return {
        "rows": len(predictions),
        "time": _errors(predictions),
        "memory": _errors(predictions, memory=True),
        "oom": _out_of_memory(predictions),
        "inside_interval": _inside(predictions),
    }


def _errors(predictions: Sequence[Prediction], *, memory: bool = False) -> dict[str, float | int | None]:
    found = [each.memory_error if memory else each.time_error for each in predictions]
    errors = np.array([error for error in found if error is not None])
    if not len(errors):
        return {"rows": 0, "mape": None, "median": None, "p90": None, "max": None, "bias": None}
    size = np.abs(errors)
    return {
        "rows": len(errors),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "max": float(size.max()),
        "bias": float(errors.mean()),
    }


def _out_of_memory(predictions: Sequence[Prediction]) -> dict[str, int]:
    failed = [each for each in predictions if each.run.is_out_of_memory]
    succeeded = [each for each in predictions if not each.run.is_out_of_memory]
    return {
        "published_oom": len(failed),
        "false_fits": sum(each.fits for each in failed),
        "published_ok": len(succeeded),
        "false_ooms": sum(not each.fits for each in succeeded),
    }


def _inside(predictions: Sequence[Prediction]) -> float | None:
    """Return the share of measured steps inside their 90 % interval."""
    timed = [each for each in predictions if each.run.step_seconds is not None]
    if not timed:
        return None
    return sum(each.low <= (each.run.step_seconds or 0.0) <= each.high for each in timed) / len(timed)


def _ranking(predictions: Sequence[Prediction]) -> dict[str, object]:
    """Score sweeps: at least three layouts of one model with equal batch, devices and everything else."""
    sweeps = [sweep for sweep in _sweeps(predictions).values() if len(sweep) >= _LEAST_OF_A_SWEEP]
    regrets = [_regret(sweep) for sweep in sweeps]
    ranks = [_spearman(sweep) for sweep in sweeps]
    return {
        "sweeps": len(sweeps),
        "spearman": float(np.mean(ranks)) if ranks else None,
        "regret": float(np.mean(regrets)) if regrets else None,
        "within_3_percent": sum(regret <= _CLOSE for regret in regrets),
    }


class Ranked(NamedTuple):
    """A layout of a sweep: predicted and measured seconds (means over repeated runs)."""

    predicted: float
    measured: float


def _sweeps(predictions: Sequence[Prediction]) -> dict[tuple[str, ...], list[Ranked]]:
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for each in predictions:
        if each.run.step_seconds is not None:
            found[_sweep(each.run)][_layout(each.run)].append(each)
    return {
        key: [
            Ranked(
                float(np.mean([each.seconds for each in repeats])),
                float(np.mean([each.run.step_seconds or 0.0 for each in repeats])),
            )
            for repeats in layouts.values()
        ]
        for key, layouts in found.items()
    }


def _sweep(run: Run) -> tuple[str, ...]:
    columns = ("model", "layers", "hidden", "heads", "sequence", "gpu", "num_gpus", "global_batch", "precision")
    apart = "not mixed" if "do not mix" in run.text("notes") else ""
    return (run.source, apart, *(run.text(name) for name in columns))


def _layout(run: Run) -> tuple[str, ...]:
    columns = ("dp", "tp", "pp", "chunks", "cp", "ep", "microbatch", "recompute", "sequence_parallel", "schedule")
    kernel = re.search(r"attn_kernel=([^;]*)", run.text("detail"))
    return (*(run.text(name) for name in columns), kernel[1] if kernel else "")


def _regret(sweep: Sequence[Ranked]) -> float:
    """Return how much slower our choice was measured than the best layout."""
    chosen = min(sweep, key=lambda each: each.predicted)
    return chosen.measured / min(each.measured for each in sweep) - 1.0


def _spearman(sweep: Sequence[Ranked]) -> float:
    predicted = _ranks([each.predicted for each in sweep])
    measured = _ranks([each.measured for each in sweep])
    if predicted.std() == 0 or measured.std() == 0:
        return 0.0
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks; equal values have their mean rank."""
    array = np.array(values)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])
