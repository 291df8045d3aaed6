"""What docs/structure.md names: the files that each of its sections about a room lists.

A section is about the rooms that its heading has in backticks, with a slash at the end: "## Reading `states/`". In it a
file is named by its path below that room, in backticks: `tiers/store.py`. With two rooms in a heading, or for
clarity, the room may stand before it: `cost/step.py`.
"""

import re
from collections import Counter

_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)


def files_named(text: str, files: frozenset[str]) -> Counter[str]:
    """How often each of the files, given as `states/tiers/store.py`, is named in a section about its room."""
    found = Counter[str]()
    for rooms, body in _sections(text):
        for name in re.findall(r"`([^`\s]+\.py)`", body):
            paths = {f"{room}{name}" for room in rooms} | ({name} if name.startswith(rooms) else set())
            found.update(paths & files)
    return found


def _sections(text: str) -> list[tuple[tuple[str, ...], str]]:
    """The rooms of every heading that names some, and the text from there to the next heading."""
    headings = list(_HEADING.finditer(text))
    ends = [each.start() for each in headings[1:]] + [len(text)]
    sections = []
    for heading, end in zip(headings, ends, strict=True):
        rooms = tuple(name for name in re.findall(r"`([^`]+)`", heading.group()) if name.endswith("/"))
        if rooms:
            sections.append((rooms, text[heading.end() : end]))
    return sections
