"""Every fault of the corpus is found by `check`, and a library without one passes."""

from collections import Counter

import pytest

from shardwise.parity import halves
from shardwise.parity.check import check
from shardwise.parity.models import default_settings, problem_of
from shardwise.planner.plan import Plan
from tests.crowd import Crowds
from tests.parity.cases import CASES
from tests.parity.check_faults import NUM_STEPS, SeededFault, read_faults, text_of, try_fault
from tests.parity.check_page import counts_of_page
from tests.parity.models import make_problem

FAULTS = read_faults()


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """One device's bf16 is drawn twice and not 16 times before a plan is called wrong: of a fault, each is in vain."""
    if not pytestconfig.getoption("--whole"):
        monkeypatch.setattr(halves, "MOST_DRAWS", 2)


def _marks(fault: SeededFault) -> tuple[pytest.MarkDecorator, ...]:
    return () if fault.by_default else (pytest.mark.whole,)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("fault", [pytest.param(each, id=each.id, marks=_marks(each)) for each in FAULTS])
def test_a_fault_is_found(fault: SeededFault, crowds: Crowds, pytestconfig: pytest.Config) -> None:
    num_steps = NUM_STEPS if pytestconfig.getoption("--whole") else fault.steps
    found = try_fault(fault, crowds.of(Plan.parse(fault.plan).num_ranks), num_steps)
    assert found.is_found
    if fault.raises:
        assert fault.raises in found.raised, found.where
    else:  # Numbers have shown it, and no rank has failed over it.
        assert found.verdict is not None, found.where


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,ep=2,zero=1,microbatches=2",
        # What these have, the first has.
        pytest.param("dp=2,zero=1,microbatches=2", marks=pytest.mark.whole),
        pytest.param("dp=2,ep=2,microbatches=2", marks=pytest.mark.whole),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(text: str, crowds: Crowds, pytestconfig: pytest.Config) -> None:
    plan = Plan.parse(text)
    num_steps = NUM_STEPS if pytestconfig.getoption("--whole") else NUM_STEPS // 2
    verdict = check(plan, problem_of(default_settings(plan), plan, num_steps), ranks=crowds.of(plan.num_ranks))
    assert verdict.is_same, (verdict.comparison.first, verdict.halves)
    assert not isinstance(verdict.halves, str), "bf16 was tried"


@pytest.mark.whole
@pytest.mark.parametrize(("model", "text"), [case for cases in CASES.values() for case in cases], ids=str)
def test_no_plan_of_the_matrix_gives_a_false_alarm(model: str, text: str, crowds: Crowds) -> None:
    plan = Plan.parse(text)
    verdict = check(plan, make_problem(model, plan, NUM_STEPS), ranks=crowds.of(plan.num_ranks))
    assert verdict.is_same, (verdict.comparison.first, verdict.halves)


def test_the_corpus_is_what_its_page_says() -> None:
    assert len(FAULTS) == len({each.id for each in FAULTS}) >= 60
    assert {each.kind for each in FAULTS if each.by_default} == {each.kind for each in FAULTS}
    assert counts_of_page() == Counter(each.kind for each in FAULTS)


def test_the_text_of_every_fault_is_there_once() -> None:
    wrong = [each.id for each in FAULTS if text_of(each).count(each.text) != 1]
    assert wrong == []
