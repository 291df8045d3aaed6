"""Reads the published runs that other benchmarks predict: the rows of quality A, and the timed ones among them."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from shardwise.planner.runs import Run, read_runs
from shardwise.planner.validate import Prediction, is_apart, predict_all

TABLE = Path("../shared/published/runs.csv")


def runs_asked_for() -> list[Run]:
    """The runs of the table that the command line names. None, after a sentence, where there is no such file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", metavar="RUNS.csv", type=Path, nargs="?", default=TABLE)
    path = parser.parse_args().runs
    if not path.exists():
        print(f"no table of runs at {path}; give its path")
        return []
    return [run for run in read_runs(path) if run.quality == "A"]


def timed(runs: Iterable[Run]) -> list[Prediction]:
    """Predictions of the runs whose step was measured, without those that are scored apart."""
    predictions, _ = predict_all(runs)
    return [each for each in predictions if each.run.step_seconds is not None and not is_apart(each.run)]
