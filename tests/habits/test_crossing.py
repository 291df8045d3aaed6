"""What crosses stages of a pipeline is equal to plain torch to 1e-5, or refused with a sentence."""

import pytest

from tests.crowd import Crowds
from tests.habits.harness import _tried, programs_of, run_topic, tried_by_default, turns_of

#: Every kind of schedule, with and without microbatches, with replicas, and `sw.place`. Most programs compute a number
#: of all rows of a part of a batch, and say that this is meant: plain torch is given each replica's part by itself.
PLANS = (
    (2, "pp=2"),
    (2, "pp=2,microbatches=4,schedule=gpipe"),
    (2, "pp=2,microbatches=4,schedule=1f1b"),
    (2, "pp=2,microbatches=4,schedule=interleaved,chunks=2"),
    (2, "pp=2,microbatches=4,schedule=zb-h1"),
    (2, "pp=2,microbatches=4,schedule=zb-v"),
    (2, "pp=2,microbatches=2,recompute=full"),
    (4, "dp=2,pp=2,microbatches=2"),
    (2, "place,pp=2,microbatches=2,schedule=gpipe"),
    (2, "place,pp=2,microbatches=4,schedule=zb-h1"),
)
#: From the first on backwards.
_IN_TURN = [PLANS[-number % len(PLANS)][1] for number in range(len(PLANS))]


@pytest.mark.parametrize(("count", "plan"), PLANS, ids=str)
def test_what_crosses_stages_is_as_in_plain_torch_or_refused(count: int, plan: str, crowds: Crowds) -> None:
    """Each program under one plan, in turn."""
    wrong = crowds.of(count).run(run_topic, "crossing", plan, _IN_TURN)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


#: What replicas count alike, and what each would have of its own.
ON_REPLICAS = ("a_number_used_by_the_unit_itself", "a_running_mean_in_an_attribute", "forwards_counted_by_the_root")


def tried_on_replicas(plan: str) -> list[str | None]:
    return [_tried(each, plan) for each in programs_of("crossing") if each.name in ON_REPLICAS]


def test_replicas_count_alike_and_do_not_drift_apart(crowds: Crowds) -> None:
    assert crowds.of(2).run(tried_on_replicas, "dp=2") == [[None] * len(ON_REPLICAS)] * 2


@pytest.mark.whole
@pytest.mark.parametrize(("count", "plan"), PLANS, ids=str)
def test_all_that_crosses_stages_is_as_in_plain_torch_or_refused(count: int, plan: str, crowds: Crowds) -> None:
    wrong = crowds.of(count).run(run_topic, "crossing", plan)
    assert not any(wrong), "\n".join(line for each in wrong for line in each)


def test_each_program_has_a_name_says_what_it_is_and_meets_a_pipeline() -> None:
    programs = programs_of("crossing")
    assert len({each.name for each in programs}) == len(programs) >= 40
    assert all(each.run.__doc__ for each in programs)
    turns = turns_of("crossing", _IN_TURN)
    assert turns.keys() == {each.name for each in tried_by_default("crossing")}
    assert len(turns) >= len(programs) // 3
    assert set(turns.values()) == {plan for _, plan in PLANS}
