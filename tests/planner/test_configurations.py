"""docs/configurations.md is what `plan` says."""

import pytest

from tests.planner.configurations import ASKED, PAGE, Asked, line

# Those whose search is short; all of them with --whole.
_SHORT = [asked for asked in ASKED if asked.model in ("mpt-7b", "internlm-7b") or asked.cluster == "1xh100"]


@pytest.mark.parametrize(
    "asked",
    [pytest.param(each, marks=() if each in _SHORT else pytest.mark.whole) for each in ASKED],
    ids=lambda asked: f"{asked.model} on {asked.cluster}",
)
def test_the_page_shows_what_plan_says(asked: Asked) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert line(asked) in text, "python -m tests.planner.configurations writes it anew"


def test_the_page_has_twenty() -> None:
    assert len(ASKED) == 20
