"""The drawing in docs/dataflow.md is what the machine reports, so it cannot lie."""

import runpy
from pathlib import Path

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_drawing_is_what_the_machine_reports() -> None:
    draw = runpy.run_path(str(PICTURES / "dataflow.py"))["draw"]
    assert (PICTURES / "dataflow.svg").read_text(encoding="utf-8") == draw()
