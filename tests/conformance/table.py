"""docs/conformance.md: for each engine a table of models by schedules, and the worst error of each cell."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.cases import MODELS, ONE_PROCESS, PROCESSES, RUNNERS, SCHEDULES, Case, layouts_for

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """\
# Conformance

Every model below is trained, unmodified, under every schedule, and compared with the plain module on the same
microbatches: the losses and all gradients of the first step, and the weights after three steps of AdamW or SGD with
momentum. PipeDream-2BW has gradients that are one step old. It is compared with a plain module that uses gradients of
the same age: W(t+1) = W(t) - lr g(W(t-1)). A second run gives the same losses, gradients and weights bit for bit. The
models are small and random, in fp32: models of `transformers` (`tests/stages/families.py`), a ResNet-50 and a U-Net
(`tests/stages/nets.py`).

Each number is the worst relative error of a gradient, ||ours - plain|| / ||plain||, over all tensors. The last column
is the worst error of a weight after three steps, over all schedules. The limit is 1e-5; 0 means equal bit for bit. The
bottom row lists numbers of stages. Each cell uses one of them, which differs from model to model.

The tests write this page. `pytest tests/conformance --write-docs` runs every cell, for all models or, with `-k`, for
some. With `--every-layout` each cell is the worst over all its numbers of stages. `make test` runs a part:

- of the first table, two of every seven cells, with two steps;
- of the second, two or three schedules for each model and at least two models for each schedule, so that every kind of
  model meets every kind of schedule (`tests/conformance/covering.py`).

`pytest --whole` runs all cells.
"""
_SECTIONS = {
    ONE_PROCESS: "One process\n\nAll ranks of the schedule run in one process, one after the other.\n",
    PROCESSES: "Processes\n\nEach rank is a process with the weights of its own stages. Values are sent over gloo.\n",
}
_TITLES = ["model", *SCHEDULES, "weights"]
_FIGURE = re.compile(r"(0|\de-\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The worst relative error of a gradient of the first step, and of a weight after the last."""

    gradient: float
    weight: float


class Table:
    """The errors that were seen, and the rows of a page, which stay where a model is not run."""

    def __init__(self, page: str = "") -> None:
        self._errors: dict[tuple[str, str], dict[str, Errors]] = {}
        self._kept = _rows_of(page)

    def note(self, runner: str, case: Case, errors: Errors) -> None:
        row = self._errors.setdefault((runner, case.model), {})
        before = row.get(case.schedule, errors)
        row[case.schedule] = Errors(
            gradient=max(errors.gradient, before.gradient), weight=max(errors.weight, before.weight)
        )

    @property
    def is_whole(self) -> bool:
        """Whether each row is from one run of all its schedules, or was there."""
        rows = ((runner, model) for runner in RUNNERS for model in MODELS)
        return all(
            len(self._errors[row]) == len(SCHEDULES) if row in self._errors else row in self._kept for row in rows
        )

    def page(self) -> str:
        return "\n".join([_HEAD, *(f"## {_SECTIONS[runner]}\n{self._table(runner)}" for runner in RUNNERS)])

    def _table(self, runner: str) -> str:
        rows = [_TITLES, ["---"] * len(_TITLES), *(self._row(runner, model) for model in MODELS)]
        rows.append(["stages", *(_stages(runner, each) for each in SCHEDULES), ""])
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def _row(self, runner: str, model: str) -> list[str]:
        errors = self._errors.get((runner, model))
        if errors is None:
            return self._kept[runner, model]
        cells = [errors[schedule].gradient for schedule in SCHEDULES] + [max(each.weight for each in errors.values())]
        return [model, *map(_digits, cells)]


def _rows_of(page: str) -> dict[tuple[str, str], list[str]]:
    """The rows of a page that are about the schedules of today."""
    found = {}
    for runner, (title, *lines) in zip(RUNNERS, _sections_of(page), strict=False):
        assert _SECTIONS[runner].startswith(title), f"a section about {title}"
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        if rows[0] == _TITLES:
            found.update({(runner, row[0]): row for row in rows[2:-1]})
    return found


def _sections_of(page: str) -> list[list[str]]:
    return [section.splitlines() for section in page.split("\n## ")[1:]]


def _digits(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def _stages(runner: str, schedule: str) -> str:
    counts = sorted({_count(schedule, *each) for each in layouts_for(runner, schedule)})
    return ", ".join(map(str, counts))


def _count(schedule: str, num_ranks: int, num_chunks: int | None, num_microbatches: int) -> int:
    return Case(
        model="gpt2", schedule=schedule, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches
    ).num_stages


def without_figures(page: str) -> str:
    """A page but for its errors: what does not change from run to run."""
    lines = (line.split(" | ") for line in page.splitlines())
    return "\n".join(
        " | ".join("*" if _FIGURE.fullmatch(cell.strip("| ")) else cell for cell in line) for line in lines
    )
