"""The check: train on one device in this process and under the plan on ranks, and compare the two."""

from dataclasses import replace

import torch

from shardwise.parity.compare import compare
from shardwise.parity.course import Course
from shardwise.parity.coverage import Halves, Seen, coverage_of
from shardwise.parity.faults import Subject, get_fault
from shardwise.parity.halves import check_halves, why_not
from shardwise.parity.legs import legs_of
from shardwise.parity.memory_check import check_given
from shardwise.parity.one_device import find_microbatches, train_alone
from shardwise.parity.problem import MakeProblem, Problem, small_matrices
from shardwise.parity.processes import check_plan, ranks_of
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.verdict import Verdict
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.working import working_at

_LIMIT_SECONDS = 600.0


def check(
    plan: Plan,
    make: MakeProblem,
    *,
    fault: str | None = None,
    vocabulary: int | None = None,
    ranks: Ranks | None = None,
    device: str = "cpu",
    bf16: bool = True,
    alone: Course | None = None,
) -> Verdict:
    """Train the same steps on one device and on the ranks of a plan, each a process on this machine.

    They compute on the CPU, or (`device="cuda"`) on the available GPUs, which they share if there are too few. All is
    computed in fp32, whatever the plan's precision, as rounding would hide errors. If the results agree, a few steps in
    bf16 follow, or in fp8 if that is the plan's, unless `bf16` is False. `fault` is injected into the ranks. `ranks`
    may be running already, and the course of one device (`alone`) may be known.
    """
    check_plan(plan)
    exact = replace(plan, precision="fp32")
    with torch.random.fork_rng(devices=[]), small_matrices():
        problem = make()
        check_given(problem.module, plan, num_steps=len(problem.batches), device=device)
        problem = problem.on(device)
        broken = None if fault is None else get_fault(fault, _subject(plan, problem, vocabulary)).breaks
        legs = legs_of(exact, problem.batches)
        working_at(f"{len(problem.batches)} steps on one device", 0, 3)
        expected = alone or train_alone(problem, exact, legs)
    working_at(f"the same on {plan.num_ranks} ranks", 1, 3)
    with ranks_of(plan, ranks, device) as crowd:
        found = crowd.run(train_on_rank, exact, make, broken, "every step", True, legs, timeout_seconds=_LIMIT_SECONDS)
        comparison = compare(expected, found)
        halves: Halves = why_not(plan, problem) or ""
        if not bf16 or fault is not None or not comparison.is_same:
            halves = halves or "it was not tried" if comparison.is_same else "fp32 differs already"
        elif not halves:
            working_at("the same in bf16", 2, 3)
            with torch.random.fork_rng(devices=[]), small_matrices():
                halves = check_halves(plan, make, crowd, device=device, timeout_seconds=_LIMIT_SECONDS)
    first = comparison.first
    held = [(rank, course.held.get(first.name or "")) for rank, course in enumerate(found)] if first else []
    seen = Seen(problem=problem, plan=exact, legs=legs, expected=expected, course=found[0], halves=halves)
    return Verdict(
        plan=exact,
        num_parameters=sum(each.numel() for each in problem.module.parameters()),
        comparison=comparison,
        owners=tuple(f"rank {rank}: {how}" for rank, how in held if how is not None),
        halves=halves,
        by_microbatches=None if comparison.is_same else find_microbatches(exact, make, legs, expected, found, device),
        coverage=coverage_of(seen),
    )


def _subject(plan: Plan, problem: Problem, vocabulary: int | None) -> Subject:
    batch = problem.batches[0]
    tokens = batch.get("input_ids")
    return Subject(
        plan=plan,
        module=problem.module,
        num_steps=len(problem.batches),
        vocabulary=vocabulary,
        length=tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else None,
    )
