"""Seeded mistakes, in what was recorded and in the library itself: the checker finds every one of them."""

from contextlib import nullcontext
from functools import cache

import pytest

from shardwise.nccl.check import prove
from shardwise.nccl.program import Program
from shardwise.parity.programs import record_on_rank
from shardwise.planner.plan import Plan
from tests.crowd import Crowd, Crowds
from tests.nccl.broken_code import BROKEN, record_broken
from tests.nccl.mistakes import MISTAKES, PLANS
from tests.nccl.short import make_short

pytestmark = pytest.mark.xdist_group("ranks")


class Recorded:
    """The programs of a plan, recorded when somebody first asks."""

    def __init__(self, crowds: Crowds) -> None:
        self._crowds = crowds
        self.of = cache(self._record)

    def _record(self, name: str) -> list[Program]:
        model, text = PLANS[name]
        plan = Plan.parse(text)
        ranks = self._crowds.of(plan.num_ranks)
        programs: list[Program] = ranks.run(record_on_rank, plan, make_short(model, plan), 120.0)
        return programs


@pytest.fixture(scope="module")
def recorded(crowds: Crowds) -> Recorded:
    return Recorded(crowds)


@pytest.mark.parametrize("name", PLANS)
def test_what_was_recorded_is_right_without_a_mistake(name: str, recorded: Recorded) -> None:
    assert not prove(recorded.of(name)).problems


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_a_mistake_in_what_ranks_ask_for_is_found(mistake, recorded: Recorded) -> None:  # type: ignore[no-untyped-def]
    programs = mistake.make(list(recorded.of(mistake.plan)))
    proof = prove(programs)
    kinds = {each.kind for each in proof.problems}
    assert kinds & set(mistake.finds), f"found {kinds or 'nothing'}"
    for each in proof.problems:
        assert any(f"rank {rank}" in each.sentence or f" {rank}" in each.sentence for rank in each.ranks)
        assert each.look


def test_there_are_mistakes_of_every_kind() -> None:
    assert len(MISTAKES) >= 40
    assert len({each.name for each in MISTAKES}) == len(MISTAKES)
    assert {each.plan for each in MISTAKES} == set(PLANS)
    assert len(BROKEN) >= 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if each.stalls else ()) for name, each in BROKEN.items()]
)
def test_a_mistake_in_the_library_is_found(name: str, crowds: Crowds) -> None:
    broken = BROKEN[name]
    count = Plan.parse(broken.plan).num_ranks
    # Ranks that stood still have made different groups, and are no good for anything else.
    with Crowd(count) if broken.stalls else nullcontext(crowds.of(count)) as ranks:
        programs: list[Program] = ranks.run(record_broken, name)
    kinds = {each.kind for each in prove(programs).problems}
    assert kinds & set(broken.finds), f"found {kinds or 'nothing'}"
