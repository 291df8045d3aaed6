"""Axes alone, in pairs and more at once: losses, norms, gradients and weights of one device, and of a second run."""

from itertools import combinations

import pytest

from shardwise.parity.compare import compare
from shardwise.parity.course import Course
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from tests.crowd import Crowds
from tests.parity.cases import BY_DEFAULT, CASES, TWICE
from tests.parity.models import HUGGING_FACE, NUM_STEPS, OURS, make_problem
from tests.parity.page import Proofs

EVERY = [(count, model, plan) for count, cases in CASES.items() for model, plan in cases]
#: Without `--whole` these are run, and where the page is written all of them.
RUN = [each for each in EVERY if each[1:] in BY_DEFAULT]


def train(plan: Plan, model: str, num_steps: int, twice: bool) -> tuple[Course, bool]:
    """What one rank makes of a plan, and whether it does so again bit for bit, if that is asked for."""
    make = make_problem(model, plan, num_steps)
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
    # Whoever writes the page runs all of them twice.
    is_page = bool(pytestconfig.getoption("--write-composition", default=False))
    twice = is_page or (model, text) in TWICE
    # The second step has the weights and the states that the first left: a third would show no more.
    num_steps = NUM_STEPS if is_page or pytestconfig.getoption("--whole") else 2
    expected = train_reference(make_problem(model, plan, num_steps)(), plan, looks="last step")
    outcomes = crowds.of(count).run(train, plan, model, num_steps, twice, timeout_seconds=300)
    comparison = compare(expected, [course for course, _ in outcomes])
    proofs.note(model, text, comparison)
    assert comparison.first is None
    assert all(is_same for _, is_same in outcomes)


@pytest.mark.parametrize("cases", [RUN, EVERY], ids=["run", "whole"])
def test_the_matrix_has_what_was_promised(cases: list[tuple[int, str, str]]) -> None:
    plans = {text: Plan.parse(text) for _, _, text in cases}
    assert len(cases) == len(set(cases)) >= (60 if cases is EVERY else 25)
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
    assert sum(len(each) > 2 for each in axes) >= (12 if cases is EVERY else 2)


def test_what_the_whole_matrix_adds_is_in_parts_in_what_is_run() -> None:
    """Whatever a case that is left out has, cases that run have: each setting, each pair of axes, each model."""
    assert len(RUN) == len(BY_DEFAULT)
    assert TWICE <= BY_DEFAULT
    ran: set[frozenset[str]] = set()
    for _, model, text in RUN:
        ran |= _parts(model, text)
    missing = {each: _parts(*each[1:]) - ran for each in EVERY if not _parts(*each[1:]) <= ran}
    assert missing == {}


def _parts(model: str, text: str) -> set[frozenset[str]]:
    """What a case is made of: its model, settings, pairs of axes and of what goes with every axis, ZeRO beside each.

    Beside tp any stage of ZeRO is as good as another: all are met beside pp, and on four ranks a case of tp takes 5.6 s
    of a core. The third beside tp is in `tests/habits` too.
    """
    words = dict(word.split("=", 1) for word in text.split(","))
    axes = {name for name in words if name in ("dp", "tp", "pp", "cp", "ep", "sp") or name.startswith("offload.")}
    zero = {f"zero={words['zero']}"} if "zero" in words else set()
    settings = {f"{name}={words[name]}" for name in ("schedule", "context", "recompute") if name in words}
    found = [{model}, {f"tied: {_is_tied(model)}", *axes & {"tp"}}]
    found += [{each} for each in (*axes, *zero, *settings)]
    found += map(set, combinations(sorted(axes), 2))
    found += [{axis, each if axis == "pp" else "zero"} for axis in axes & {"tp", "pp"} for each in zero]
    return set(map(frozenset, found))


def _is_tied(model: str) -> bool:
    return model in OURS and bool(OURS[model].get("tied", True))


def _axes(plan: Plan) -> set[str]:
    return {axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(plan, axis) > 1}
