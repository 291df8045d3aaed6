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
#: What other cases have every part of: run by `--whole`, and where the page is written.
REPEATED = {
    ("3 key heads", "dp=2,tp=2,zero=3,microbatches=2"),
    ("experts", "dp=2,tp=2,ep=2"),
    ("experts", "tp=2,cp=2,ep=2"),
    ("gpt2", "dp=2,tp=2,pp=2,schedule=zb-v,microbatches=4,sp=true,zero=1"),
    ("3 key heads", "dp=2,tp=2,pp=2,microbatches=2,layers=1+2,zero=3"),
    ("tied", "dp=2,pp=2,cp=2,microbatches=2,zero=3"),
    ("tied", "tp=2,pp=2,cp=2,schedule=zb-h1,microbatches=2"),
    # `tests/states/buckets` has groups of shards on four ranks.
    ("untied", "dp=4,tp=2,zero=3,zero_group=2"),
    ("untied", "dp=2,tp=2,pp=2,schedule=interleaved,chunks=2,microbatches=2,zero=3"),
}
RUN = [each for each in EVERY if each[1:] not in REPEATED]


def train(plan: Plan, model: str, twice: bool) -> tuple[Course, bool]:
    """What one rank makes of a plan, and whether it does so again bit for bit, if that is asked for."""
    make = make_problem(model, plan)
    first = train_on_rank(plan, make, looks="last step", finds_uses=False)
    if not twice:
        return first, True
    return first, train_on_rank(plan, make, looks="never", finds_uses=False).digest == first.digest


@pytest.mark.parametrize(
    ("count", "model", "text"),
    [pytest.param(*each, id=f"{each[1]}-{each[2]}", marks=() if each in RUN else pytest.mark.whole) for each in EVERY],
)
def test_ranks_train_as_one_device_does(
    count: int, model: str, text: str, crowds: Crowds, proofs: Proofs, pytestconfig: pytest.Config
) -> None:
    plan = Plan.parse(text)
    # Whoever writes the page runs all of them twice; else every tenth is, of those on two ranks.
    twice = bool(pytestconfig.getoption("--write-composition", default=False)) or (
        count == 2 and EVERY.index((count, model, text)) % 10 == 0
    )
    expected = train_reference(make_problem(model, plan)(), plan, looks="last step")
    outcomes = crowds.of(count).run(train, plan, model, twice, timeout_seconds=300)
    comparison = compare(expected, [course for course, _ in outcomes])
    proofs.note(model, text, comparison)
    assert comparison.first is None
    assert all(is_same for _, is_same in outcomes)


@pytest.mark.parametrize("cases", [RUN, EVERY], ids=["run", "whole"])
def test_the_matrix_has_what_was_promised(cases: list[tuple[int, str, str]]) -> None:
    plans = {text: Plan.parse(text) for _, _, text in cases}
    assert len(cases) == len(set(cases)) >= 60
    assert {count for count, *_ in cases} == {2, 4, 8}
    assert all(plans[text].num_ranks == count for count, _, text in cases)
    assert all(map(composes, plans.values()))
    assert {model for _, model, _ in cases} == {*OURS, *HUGGING_FACE}
    axes = [_axes(plan) for plan in plans.values()]
    # Experts are shared out among ranks that are there for data and context: ep is never alone.
    for one in ("dp", "tp", "pp", "cp"):
        assert {one} in axes, one
        for other in ("dp", "tp", "pp", "cp", "ep"):
            assert any({one, other} <= each for each in axes), (one, other)
    assert sum(len(each) > 2 for each in axes) >= (12 if cases is EVERY else 8)


def test_what_the_whole_matrix_adds_is_in_parts_in_what_is_run() -> None:
    """A case that is left out has its axes, its model, its schedule and its ZeRO stage in others that run."""
    assert len(EVERY) - len(RUN) == len(REPEATED)
    ran = [(model, Plan.parse(text)) for _, model, text in RUN]
    with_tensors = [(model, plan) for model, plan in ran if plan.tp > 1]
    for model, text in REPEATED:
        plan = Plan.parse(text)
        assert any(_axes(plan) <= _axes(other) for _, other in ran), text
        assert any(model == other for other, _ in ran), text
        beside = with_tensors if plan.tp > 1 else ran
        assert any(_is_tied(model) == _is_tied(other) for other, _ in beside), text
        assert any(plan.zero == other.zero for _, other in beside), text
        assert any(plan.schedule == other.schedule for _, other in ran), text


def _is_tied(model: str) -> bool:
    return model in OURS and bool(OURS[model].get("tied", True))


def _axes(plan: Plan) -> set[str]:
    return {axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(plan, axis) > 1}
