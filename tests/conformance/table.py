"""The table of docs/conformance.md: models by schedules, and the worst error of each cell."""

from pathlib import Path

from tests.conformance.cases import MODELS, SCHEDULES, Case, layouts

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """\
# Conformance

Every model below, unmodified, is trained under every schedule with weights of the newest step, and held against the
plain module on the same microbatches: the loss and every gradient of a step, and the weights after three steps of AdamW
or SGD with momentum. On a second run loss and gradients are the same bit for bit. The models are small and random:
those of `transformers` (`tests/runtime/families.py`), a ResNet-50 and a U-Net (`tests/runtime/nets.py`).

A number is the worst relative error of a gradient, ||ours - plain|| / ||plain||, over all tensors and over all numbers
of stages that are named at the bottom; 1e-5 is what we promise. 0 is the same bit for bit.

This page is written by the tests: `pytest tests/conformance --write-docs`.

"""


class Table:
    """The errors that were seen."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], float] = {}

    def note(self, case: Case, error: float) -> None:
        cell = case.model, case.schedule
        self._errors[cell] = max(error, self._errors.get(cell, 0.0))

    @property
    def is_whole(self) -> bool:
        return len(self._errors) == len(MODELS) * len(SCHEDULES)

    def page(self) -> str:
        rows = [["model", *SCHEDULES], ["---"] * (len(SCHEDULES) + 1)]
        rows += [[model, *(_digits(self._errors[model, schedule]) for schedule in SCHEDULES)] for model in MODELS]
        rows.append(["stages", *(_stages(schedule) for schedule in SCHEDULES)])
        return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _digits(error: float) -> str:
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def _stages(schedule: str) -> str:
    return ", ".join(str(count) for count in dict.fromkeys(_count(schedule, *each) for each in layouts(schedule)))


def _count(schedule: str, num_ranks: int, num_chunks: int | None, num_microbatches: int) -> int:
    return Case(
        model="gpt2", schedule=schedule, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches
    ).num_stages


def listed(page: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The models and the schedules that a page lists."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return tuple(row[0] for row in rows[2:-1]), tuple(rows[0][1:])
