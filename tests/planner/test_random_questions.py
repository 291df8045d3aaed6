"""Whatever is asked: an answer that fits and runs and that no simple plan beats, or a sentence with what to type."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner.account import account
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from shardwise.planner.search.findings import find_plan
from tests.planner.random_questions import ask, draw, simple_plans

# Of plans that are this near to the fastest the simplest is chosen; schedules that are played may differ by as much
# again from the closed forms that chose among them.
_NEAR = 0.06


def answer(seed: int, *, large: bool) -> str | None:
    """What is wrong with the answer to a question, if anything is."""
    try:
        question = ask(seed, large=large)
        found = find_plan(question)
    except ShardwiseError as error:
        return None if error.problem and error.remedy else f"an error without a remedy: {error}"
    again = account(question, Plan.parse(str(found.plan)))
    if not again.fits:
        return f"{found.plan} does not fit"
    if not composes(found.plan):
        return f"{found.plan} does not run"
    best = min((each.seconds for each in simple_plans(question)), default=float("inf"))
    if found.best.seconds > (1 + _NEAR) * best:
        return f"{found.plan} takes {found.best.seconds:.3g} s, and a simple one {best:.3g} s"
    return None


def complaints(seeds: range, *, large: bool) -> dict[tuple[object, ...], str]:
    answers = {draw(seed, large=large): answer(seed, large=large) for seed in seeds}
    return {asked: wrong for asked, wrong in answers.items() if wrong is not None}


def test_a_few_random_questions_are_answered() -> None:
    assert complaints(range(6), large=False) == {}


@pytest.mark.whole
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_two_hundred_random_questions_are_answered(start: int) -> None:
    assert complaints(range(start, start + 20), large=True) == {}
