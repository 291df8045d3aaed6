"""Random modules under random plans: equal to plain torch, or refused with a sentence before the first step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shardwise.planner.plan import Plan
from tests.crowd import Crowds
from tests.habits.drawn.cases import Case, Operation, draw, make_module, program_of, smaller
from tests.habits.drawn.judge import FAILS, Verdict
from tests.habits.drawn.plans import PLANS
from tests.habits.random_modules import Bench, reason_of, summary

#: Those of two ranks among them are tried by default: a case takes 0.8 s of a core. All others with `--whole`. The
#: last was silently wrong under tp: numbers of the trial grew to 1e23, and what differed was lost beside them.
BY_DEFAULT = (*range(2), 38, 5321)
WHOLE = range(2000)
#: At most so many of the cases that plain dp takes may be refused.
MOST_REFUSED = 0.05


def failures(bench: Bench, cases: list[Case]) -> tuple[list[str], float]:
    """What failed, as small programs; and which part of all was refused though plain dp takes it."""
    judged = list(bench.judge_all(cases))
    found = []
    for case, verdict in judged:
        if verdict.kind in FAILS:
            small, last = bench.shrink(case, verdict)
            found.append(f"{last.kind}: {program_of(small)}\n{last.said}")
    refused = [case for case, verdict in judged if verdict.kind == "refused"]
    asked = [replace(case, plan=f"dp={case.num_ranks}") for case in refused]
    plainly = {case.seed: verdict.kind for case, verdict in bench.judge_all(asked)} if asked else {}
    return found, summary(judged, lambda case: plainly[case.seed] == "equal")["refused"]


@pytest.mark.parametrize("count", [2])
def test_random_modules_train_as_plain_torch_does_or_are_refused(count: int, crowds: Crowds) -> None:
    cases = [case for seed in BY_DEFAULT if (case := draw(seed)).num_ranks == count]
    found, _ = failures(Bench(crowds), cases)
    assert not found, "\n".join(found)


@pytest.mark.whole
@pytest.mark.parametrize("count", [2, 4])
def test_two_thousand_random_modules_train_as_plain_torch_does_or_are_refused(count: int, crowds: Crowds) -> None:
    cases = [case for seed in WHOLE if (case := draw(seed)).num_ranks == count]
    found, refused = failures(Bench(crowds), cases)
    assert not found, "\n".join(found)
    assert refused <= MOST_REFUSED


def test_a_seed_gives_one_case_and_every_plan_is_drawn() -> None:
    assert draw(7) == draw(7)
    assert {draw(seed).plan for seed in range(1500)} == set(PLANS)
    assert all(Plan.parse(plan).num_ranks in (2, 4) for plan in PLANS)


def test_every_case_can_be_made_and_printed() -> None:
    for seed in range(12):
        case = draw(seed)
        one, other = make_module(case, torch.float32), make_module(case, torch.float32)
        for name, each in one.state_dict().items():
            assert torch.equal(each, other.state_dict()[name]), (seed, name)
        assert case.plan in program_of(case)


def test_a_case_is_made_smaller_while_it_fails_in_the_same_way() -> None:
    """A bench that calls everything with a roll wrong: what is left is the roll."""

    class Fussy(Bench):
        def judge(self, cases: Sequence[Case]) -> list[Verdict]:
            return [Verdict("wrong" if "'roll'" in str(each) else "equal") for each in cases]

    roll = Operation("Feed", {"gate": "chunk", "first": "roll", "second": "tanh", "bias": False, "around": "twice"})
    gate = Operation("Gated", {"act": "silu", "joined": "sum"}, "norm last")
    case = Case(3, "dp=2,tp=2,zero=1", ((gate, roll), (gate,)), hangs=(("tied", 1),), optimizer="adamw", clip=0.5)
    small, _ = Fussy(Crowds()).shrink(case, Verdict("wrong"))
    plain = {"gate": "none", "first": "roll", "second": "none", "bias": True, "around": "nothing"}
    assert small.blocks == ((Operation("Feed", plain),),)
    assert (small.hangs, small.optimizer, small.clip) == ((), "sgd", None)
    assert len(small.plan.split(",")) == 1
    assert all("'roll'" not in str(each) or each == small for each in smaller(small))


def test_refusals_of_one_reason_are_counted_together() -> None:
    one = reason_of("a hook of blocks.0.weight (register_hook) would be called, under dp=2\n  try: another")
    assert one == reason_of("a hook of head.bias (register_hook) would be called, under dp=4\n  try: another")
