"""docs/nccl.md has every mistake that is made to see that it is found, in the order in which they are made."""

from pathlib import Path

from tests.nccl.broken_code import BROKEN
from tests.nccl.mistakes import MISTAKES, PLANS

PAGE = Path(__file__).parents[2] / "docs" / "nccl.md"


def test_the_page_has_every_mistake_with_its_plan_and_what_it_is_found_as() -> None:
    found = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "`" in line]
    wanted = [f"| {each.name} | `{PLANS[each.plan][1]}` | {', '.join(each.finds)} |" for each in MISTAKES]
    wanted += [f"| {name} | `{each.plan}` | {', '.join(each.finds)} |" for name, each in BROKEN.items()]
    assert found == wanted


def test_the_mistakes_that_make_ranks_stand_still_are_the_last_five() -> None:
    assert [each.stalls for each in BROKEN.values()] == [False] * 13 + [True] * 5
