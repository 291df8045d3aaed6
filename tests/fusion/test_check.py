"""A check holds kernels against the plain operators of one device, and says so."""

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.parity.compare import compare
from shardwise.parity.coverage import Seen, coverage_of
from shardwise.parity.legs import one_leg
from shardwise.parity.problem import Problem
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.planner.plan import Plan
from tests.fusion.models import make, make_batch, own_loss


def problem(**options: Any) -> Problem:
    return Problem(module=make("llama").train(), batches=[make_batch()], loss=own_loss, options=options)


def said_of(found: Any, given: Problem, plan: Plan) -> list[str]:
    legs = one_leg(plan, 1)
    seen = Seen(problem=given, plan=plan, legs=legs, expected=found, course=found, halves="it was not tried")
    coverage = coverage_of(seen)
    return [*coverage.covered, *coverage.left_out]


def test_kernels_are_held_against_the_plain_operators_of_one_device() -> None:
    plan = Plan.parse("dp=1")
    expected = train_reference(problem(), plan)
    found = train_on_rank(plan, problem)
    assert compare(expected, [found]).is_same
    # Two norms, an attention and an MLP in each of two layers; a norm and a head.
    assert found.num_with_kernels == 10
    assert "kernels of 10 modules, against the plain operators of one device" in said_of(found, problem(), plan)
    off = problem(kernels=False)
    assert "kernels: they are turned off" in said_of(expected, off, plan)


def test_a_placed_module_has_kernels_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU it is placed there")
    module, batch = make("llama"), make_batch()
    plain = module(**batch, use_cache=False)
    placed = sw.place(make("llama"), ["cpu:0"])
    assert placed.kernels[0].startswith("kernels in place of 2 x rotary positions")
    assert "head" not in placed.kernels[0], "its weight may be gone when somebody asks for logits"
    made = placed(**batch, use_cache=False)
    torch.testing.assert_close(made.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert sw.place(make("llama"), ["cpu:0"], kernels=False).kernels == []
    monkeypatch.delenv("TRITON_INTERPRET")
    assert sw.place(make("llama"), ["cpu:0"]).kernels == [], "a CPU has no kernels"
