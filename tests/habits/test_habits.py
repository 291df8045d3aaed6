"""Every program of this folder under every kind of plan: equal to plain torch to 1e-5, or refused with a sentence."""

from pathlib import Path

import pytest

from tests.crowd import Crowd, Crowds
from tests.habits.harness import FOUR, TWO, programs_of, run_one, run_topic, topics, turns_of

TOPICS = topics([each.stem for each in Path(__file__).parent.glob("*.py")])
_PLANS = [(2, plan) for plan in TWO] + [(4, plan) for plan in FOUR]
_EVERY_PLAN = (*TWO, *FOUR)


#: The files of which a program is tried under a plan by default. To ask ranks for nothing takes 25 ms of a core.
_TURNS = [
    (count, plan, topic) for count, plan in _PLANS for topic in TOPICS if plan in turns_of(topic, _EVERY_PLAN).values()
]


@pytest.mark.parametrize(("count", "plan", "topic"), _TURNS, ids=str)
def test_what_users_write_is_equal_to_plain_torch_or_refused(count: int, plan: str, topic: str, crowds: Crowds) -> None:
    """Each program under one plan, in turn: every plan meets some."""
    wrong = crowds.of(count).run(run_topic, topic, plan, _EVERY_PLAN)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


@pytest.mark.whole
@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize(("count", "plan"), _PLANS, ids=str)
def test_all_that_users_write_is_equal_to_plain_torch_or_refused(
    topic: str, count: int, plan: str, crowds: Crowds
) -> None:
    wrong = crowds.of(count).run(run_topic, topic, plan)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


def test_rows_are_tried_under_cp_too_if_they_are_cut(two: Crowd) -> None:
    wrong = two.run(run_one, "backwards", "gradients_of_rows_are_centred", "cp=2,microbatches=2")
    assert wrong == [None, None]


def test_gradients_that_a_loss_asks_for_are_refused_if_other_stages_have_some_of_them(two: Crowd) -> None:
    """Without microbatches, for which the loss would be refused anyway."""
    for name in ("the_same_of_a_tied_layer", "a_penalty_on_gradients_of_the_inputs"):
        assert two.run(run_one, "weighing", name, "pp=2") == [None, None]


def test_every_plan_has_programs_of_several_files() -> None:
    for plan in _EVERY_PLAN:
        met = [topic for topic in TOPICS if plan in turns_of(topic, _EVERY_PLAN).values()]
        assert len(met) >= (1 if "ep=2" in plan else 2), (plan, met)


def test_no_program_has_the_name_of_another_and_each_says_what_it_is() -> None:
    for topic in TOPICS:
        names = [each.name for each in programs_of(topic)]
        assert len(set(names)) == len(names)
        assert all(each.run.__doc__ for each in programs_of(topic)), topic
