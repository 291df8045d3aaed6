"""The check itself: one device here, the plan on ranks of its own, and the two compared."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from shardwise.engine.module_check import check_module
from shardwise.errors import ShardwiseError
from shardwise.parity.compare import Comparison, compare
from shardwise.parity.course import Course
from shardwise.parity.coverage import Coverage, Seen, coverage_of
from shardwise.parity.faults import Subject, get_fault
from shardwise.parity.halves import check_halves, why_not
from shardwise.parity.legs import Leg, legs_of
from shardwise.parity.problem import MakeProblem, Problem, small_matrices
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import sees_whole, train_reference
from shardwise.parity.rounding import Rounding
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.stages.batch import length_of
from shardwise.stages.split.lines import line_of_error

#: Each rank is a process with a torch of its own.
MOST_RANKS = 32
MOST_MICROBATCHES = 256
_LIMIT_SECONDS = 600.0
# A loss of a whole batch is a sum if it is so nearly as many times as large as there are parts.
_IS_TIMES = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a plan compares with one device. `owners` are the ranks that hold the first tensor that differs.

    `halves` is how its bf16 compares; or why that was not tried. `by_microbatches` says, where ranks train what one
    device trains on microbatches and not on whole batches, by how much these differ.
    """

    plan: Plan
    num_parameters: int
    comparison: Comparison
    owners: tuple[str, ...]
    halves: Rounding | str
    by_microbatches: str | None
    coverage: Coverage

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, in fp32 nor in bf16."""
        return self.comparison.is_same and (isinstance(self.halves, str) or self.halves.problem is None)


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

    They compute on the CPU, or (`device="cuda"`) on the GPUs that there are, which they share if these are fewer. All
    is computed in fp32, whatever the plan says: rounding would hide what is sought. If that is the same, a few steps in
    bf16 follow, unless `bf16` is False. With `fault` the ranks make it. `ranks` may be up already, and what one
    device does (`alone`) may be known.
    """
    check_composition(plan)
    check_size(plan)
    exact = replace(plan, precision="fp32")
    gpus: Gpus = "shared" if device == "cuda" else "none"
    with torch.random.fork_rng(devices=[]), small_matrices():
        problem = make().on(device)
        check_module(problem.module)
        broken = None if fault is None else get_fault(fault, _subject(plan, problem, vocabulary)).breaks
        legs = legs_of(exact, len(problem.batches), length_of(problem.batches[0]))
        expected = alone or train_alone(problem, exact, legs)
    with nullcontext(ranks) if ranks is not None else Ranks(plan.num_ranks, gpus=gpus) as crowd:
        try:
            found = crowd.run(
                train_on_rank, exact, make, broken, "every step", True, legs, timeout_seconds=_LIMIT_SECONDS
            )
        except RankError as error:
            raise sentence_of(error) from None
        comparison = compare(expected, found)
        halves: Rounding | str = why_not(plan, problem) or ""
        if not bf16 or fault is not None or not comparison.is_same:
            halves = halves or "it was not tried" if comparison.is_same else "fp32 differs already"
        elif not halves:
            with torch.random.fork_rng(devices=[]), small_matrices():
                halves = check_halves(exact, make, crowd, device=device, timeout_seconds=_LIMIT_SECONDS)
    first = comparison.first
    held = [(rank, course.held.get(first.name or "")) for rank, course in enumerate(found)] if first else []
    seen = Seen(problem=problem, plan=exact, legs=legs, expected=expected, course=found[0], halves=halves)
    return Verdict(
        plan=exact,
        num_parameters=sum(each.numel() for each in problem.module.parameters()),
        comparison=comparison,
        owners=tuple(f"rank {rank}: {how}" for rank, how in held if how is not None),
        halves=halves,
        by_microbatches=None if comparison.is_same else _find_microbatches(exact, make, legs, expected, found, device),
        coverage=coverage_of(seen),
    )


def _find_microbatches(
    plan: Plan, make: MakeProblem, legs: Sequence[Leg], expected: Course, found: Sequence[Course], device: str
) -> str | None:
    """Where ranks train what one device trains on microbatches, and not on whole batches: how these differ."""
    num_parts = plan.dp * plan.microbatches
    with torch.random.fork_rng(devices=[]), small_matrices():
        problem = make().on(device)
        if num_parts == 1 or not sees_whole(problem):
            return None
        cut = train_reference(problem, plan, "every step", legs, whole=False)
    if not compare(cut, found).is_same:
        return None
    whole, parts = expected.steps[0].loss, cut.steps[0].loss
    what = f"the first loss is {whole:.6g} of a whole batch, and {parts:.6g} of its {num_parts} parts"
    if parts and abs(whole / parts / num_parts - 1) < _IS_TIMES:
        return f"{what}: it is a sum without its number"
    return f"{what}: it is a mean of means over unequal numbers, or looks across rows"


def train_alone(problem: Problem, plan: Plan, legs: Sequence[Leg]) -> Course:
    """The steps on one device. What fails there is no matter of the plan."""
    try:
        return train_reference(problem, plan, legs=legs)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ShardwiseError(
            f"{type(problem.module).__name__} and its loss cannot be trained on one device already:"
            f" {type(error).__name__}: {error}, at {line_of_error(error)}",
            remedy="a batch that the module takes, and a loss(output, batch) that gives a mean, or a sum and a number",
        ) from error


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


def check_size(plan: Plan) -> None:
    """Refuse more ranks and microbatches than a machine has room and time for."""
    if plan.microbatches > MOST_MICROBATCHES:
        raise ShardwiseError(
            f"the plan has {plan.microbatches} microbatches, and each is run here, on as many rows: at most"
            f" {MOST_MICROBATCHES}",
            remedy=f"--plan {replace(plan, microbatches=MOST_MICROBATCHES)}, the same in small",
        )
    if plan.num_ranks > MOST_RANKS:
        least = {axis: min(2, getattr(plan, axis)) for axis in ("dp", "tp", "pp", "cp", "ep")}
        axes = ",".join(f"{axis}={size}" for axis, size in least.items() if size > 1)
        raise ShardwiseError(
            f"the plan has {plan.num_ranks} ranks, and each is a process here: at most {MOST_RANKS}",
            remedy=f"--plan {axes}, the same axes in small",
        )


def sentence_of(error: RankError) -> ShardwiseError:
    """A user's mistake, found by a rank, without the way that led there; a mistake of ours as it is."""
    if "shardwise.errors.ShardwiseError" not in error.problem:
        return error
    return ShardwiseError(error.problem.splitlines()[0], remedy=error.remedy)
