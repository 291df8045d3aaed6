"""The problems of the matrix with two steps: the second has all that a step has, and no header is sent in it."""

from dataclasses import replace
from functools import partial

from shardwise.parity.problem import MakeProblem, Problem
from shardwise.planner.plan import Plan
from tests.parity.models import make_problem, untried


def make_short(model: str, plan: Plan) -> MakeProblem:
    return partial(_shortened, model, plan)


def _shortened(model: str, plan: Plan) -> Problem:
    problem = untried(make_problem(model, plan))
    return replace(problem, batches=problem.batches[:2])
