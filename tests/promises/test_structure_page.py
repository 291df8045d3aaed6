"""docs/structure.md names every file of the source, once, where its room is read."""

import re

from tests.promises.lines import STRUCTURE
from tests.promises.naming import files_named
from tests.promises.sources import ROOT, all_sources


def files_of_rooms() -> frozenset[str]:
    """Files in rooms. Those beside the rooms are in the table of lines; an `__init__.py` only opens a package."""
    return frozenset(source.name for source in all_sources() if "/" in source.name and not source.is_package)


def test_every_file_is_named_once_under_the_heading_of_its_room() -> None:
    named = files_named(STRUCTURE.read_text(encoding="utf-8"), files_of_rooms())
    found = [f"{file} is named {named[file]} times" for file in sorted(files_of_rooms()) if named[file] != 1]
    assert not found, "\n".join(["", *found])


PAGE = """
# Structure

`cost/step.py` and `step.py` before any heading of a room are in passing.

## Reading `cost/`

1. `step.py`: the step. `deep/play.py` over `cluster/file.py`, and `play.py`, which is elsewhere.

### Reading `cost/deep/`

`more.py` and `step.py` of this folder.

## Reading `model/` and `cluster/`

`model.py`, `cluster/device.py`, twice: `model/model.py`.

## What stands on what

`missing.py`
"""


def test_a_file_is_named_by_its_path_below_the_room_of_the_heading() -> None:
    costs = ["cost/step.py", "cost/deep/play.py", "cost/deep/more.py", "cost/missing.py"]
    files = frozenset([*costs, "cluster/file.py", "cluster/device.py", "model/model.py"])
    assert files_named(PAGE, files) == {
        "cost/step.py": 1,
        "cost/deep/play.py": 1,
        "cost/deep/more.py": 1,
        "cluster/device.py": 1,
        "model/model.py": 2,
    }


def test_the_examples_of_what_a_change_touches_have_about_the_lines_that_are_told() -> None:
    """CONTRIBUTING.md names a schedule, an optimizer, a tier and a way to split a layer, with the lines of each."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r"`([\w/]+\.py)` \((\d+) lines\)", text)
    assert len(told) >= 4
    for name, count in told:
        (source,) = (each for each in all_sources() if f"/{each.name}".endswith(f"/{name}"))
        assert abs(len(source.text.splitlines()) - int(count)) <= 0.1 * int(count), name
