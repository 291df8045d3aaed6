"""Axes alone, in pairs and more at once: losses, norms, gradients and weights of one device, and of a second run."""

import pytest

from shardwise.parity.compare import compare
from shardwise.parity.course import Course
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from tests.crowd import Crowds
from tests.parity.cases import CASES
from tests.parity.models import HUGGING_FACE, OURS, make_problem
from tests.parity.page import Proofs

EVERY = [(count, model, plan) for count, cases in CASES.items() for model, plan in cases]


def train(plan: Plan, model: str, twice: bool) -> tuple[Course, bool]:
    """What one rank makes of a plan, and whether it does so again bit for bit, if that is asked for."""
    make = make_problem(model, plan)
    first = train_on_rank(plan, make, looks="last step", finds_uses=False)
    if not twice:
        return first, True
    return first, train_on_rank(plan, make, looks="never", finds_uses=False).digest == first.digest


@pytest.mark.parametrize(("count", "model", "text"), EVERY, ids=[f"{model}-{plan}" for _, model, plan in EVERY])
def test_ranks_train_as_one_device_does(
    count: int, model: str, text: str, crowds: Crowds, proofs: Proofs, pytestconfig: pytest.Config
) -> None:
    plan = Plan.parse(text)
    # Whoever writes the page runs all of them twice; else every tenth is, of those that are not too large for it.
    twice = bool(pytestconfig.getoption("--write-composition", default=False)) or (
        count < 8 and EVERY.index((count, model, text)) % 10 == 0
    )
    expected = train_reference(make_problem(model, plan)(), plan, looks="last step")
    outcomes = crowds.of(count).run(train, plan, model, twice, timeout_seconds=300)
    comparison = compare(expected, [course for course, _ in outcomes])
    proofs.note(model, text, comparison)
    assert comparison.first is None
    assert all(is_same for _, is_same in outcomes)


def test_the_matrix_has_what_was_promised() -> None:
    plans = {text: Plan.parse(text) for _, _, text in EVERY}
    assert len(EVERY) == len(set(EVERY)) >= 60
    assert {count for count, *_ in EVERY} == {2, 4, 8}
    assert all(plans[text].num_ranks == count for count, _, text in EVERY)
    assert all(map(composes, plans.values()))
    assert {model for _, model, _ in EVERY} == {*OURS, *HUGGING_FACE}
    axes = [_axes(plan) for plan in plans.values()]
    # Experts are shared out among ranks that are there for data and context: ep is never alone.
    for one in ("dp", "tp", "pp", "cp"):
        assert {one} in axes, one
        for other in ("dp", "tp", "pp", "cp", "ep"):
            assert any({one, other} <= each for each in axes), (one, other)
    assert sum(len(each) > 2 for each in axes) >= 12


def _axes(plan: Plan) -> set[str]:
    return {axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(plan, axis) > 1}
