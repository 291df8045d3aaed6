"""The coverage of a check: what it has compared, and what it has not. It is reported with the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.nets.moe import MoE
from shardwise.parity.course import Course
from shardwise.parity.legs import Leg, is_other
from shardwise.parity.problem import Problem
from shardwise.parity.reference import sees_whole
from shardwise.parity.rounding import Rounding
from shardwise.parity.rows import across_rows
from shardwise.planner.plan import Plan
from shardwise.stages.batch import length_of
from shardwise.units import counted

_NEVER = "fp16, compiled blocks, and files of checkpoints (what is saved here are the two state dicts)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Sentences without a full stop."""

    covered: Sequence[str]
    left_out: Sequence[str]


#: The result in bf16, or the reason why it was not tried.
Halves = Rounding | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The inputs and results of a check: problem, plan, legs, the courses of one device and of a rank, and bf16."""

    problem: Problem
    plan: Plan
    legs: Sequence[Leg]
    expected: Course
    course: Course
    halves: Halves


def coverage_of(seen: Seen) -> Coverage:
    """Return the coverage of a check, in the order of a step."""
    covered, left_out = [_steps(seen)], list(seen.problem.left_out)
    for says, why_not in (
        _whole_batches(seen), _optimizer(seen), _buckets(seen), _dropout(seen),
        _kept_weights(seen.problem.module), _experts(seen.problem.module), _evaluation(seen), _saves(seen),
        _other_plan(seen), _halves(seen), _whole_layers(seen), _kernels(seen),
    ):  # fmt: skip
        covered += [says] if says else []
        left_out += [why_not] if why_not else []
    return Coverage(covered=covered, left_out=[*left_out, _NEVER])


#: What was compared, or the reason why not. Both are None if it does not apply.
_Said = tuple[str | None, str | None]


def _steps(seen: Seen) -> str:
    steps = counted(len(seen.problem.batches), "step")
    clip = "" if seen.problem.clip is None else f", clipped to {seen.problem.clip:g}"
    return f"{steps}: loss, every gradient, their norm{clip}, weights where they are used and after the step"


def _whole_batches(seen: Seen) -> _Said:
    rows, pieces = length_of(seen.problem.batches[0]), seen.plan.dp * seen.plan.microbatches
    if pieces == 1:
        return None, None
    cut = f"{counted(seen.plan.dp, 'replica')} and {counted(seen.plan.microbatches, 'microbatch')}"
    if sees_whole(seen.problem):
        return f"whole batches of {counted(rows, 'row')} on one device, against {cut}", None
    why = ", ".join(across_rows(seen.problem.module)) or "the module"
    return None, f"whole batches: {why} looks across rows, so one device had the plan's microbatches"


def _optimizer(seen: Seen) -> _Said:
    return seen.course.updated_by, None if seen.problem.scheduler is not None else "a scheduler: none was given"


def _buckets(seen: Seen) -> _Said:
    found = seen.course.num_buckets
    if found > 1:
        return f"gradients in {counted(found, 'bucket')} a rank", None
    return None, "more than one bucket of gradients: there is too little for a second"


def _dropout(seen: Seen) -> _Said:
    found = seen.expected.num_dropping
    if found:
        return f"dropout of {counted(found, 'module')}, with one device's masks", None
    return None, "dropout: nothing of the module drops"


def _kept_weights(module: nn.Module) -> _Said:
    frozen = sum(not each.requires_grad for each in module.parameters())
    tied = len(list(module.named_parameters(remove_duplicate=False))) - len(list(module.named_parameters()))
    found = [f"{frozen} frozen"] if frozen else []
    found += [f"{tied} tied"] if tied else []
    lacks = [word for word, count in (("frozen", frozen), ("tied", tied)) if not count]
    missing = f"{' and '.join(lacks)} weights: the module has none" if lacks else None
    return f"weights: {', '.join(found)}" if found else None, missing


def _experts(module: nn.Module) -> _Said:
    mixtures = [each.mixture for each in module.modules() if isinstance(each, MoE)]
    if not mixtures:
        return None, None
    one = mixtures[0]
    parts = {
        f"a balancing loss of weight {one.auxiliary:g}": bool(one.auxiliary),
        f"a capacity of {one.capacity or 0:g} shares": one.capacity is not None,
        "corrections of routers": one.correction,
    }
    return f"experts with {', '.join(name for name, is_there in parts.items() if is_there) or 'no balance'}", None


def _evaluation(seen: Seen) -> _Said:
    *steps, last = map(str, sorted(seen.expected.evaluations))
    return f"evaluate of another batch, after step {' and '.join(filter(None, (', '.join(steps), last)))}", None


def _saves(seen: Seen) -> _Said:
    if len(seen.legs) == 1:
        return None, "save and load: there are fewer than 4 steps"
    return f"saved after step {seen.legs[0].stop - 1}, and loaded by a fresh engine that goes on", None


def _other_plan(seen: Seen) -> _Said:
    others = [leg for leg in seen.legs if is_other(leg, seen.legs)]
    if others:
        return f"saved after step {others[0].first - 1}, and gone on with under {others[0].plan}", None
    why = "there is one rank" if seen.plan.num_ranks == 1 else "no other plan takes these batches"
    return None, f"going on under another plan: {why}" if len(seen.legs) > 1 else None


def _whole_layers(seen: Seen) -> _Said:
    found = seen.course.left_whole
    if not found:
        return None, None
    first, why = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return None, f"tensor parallelism of {first}{more}, which every rank has whole: {why}"


def _halves(seen: Seen) -> _Said:
    if isinstance(seen.halves, str):
        return None, f"bf16 with masters: {seen.halves}"
    kind, against = seen.halves.precision, seen.halves.against
    return f"{kind} with fp32 masters, saved and loaded: no further from {against} than one device in {kind}", None


def _kernels(seen: Seen) -> _Said:
    if seen.problem.options.get("kernels", True) is False:
        return None, "kernels: they are turned off"
    count = seen.course.num_with_kernels
    if not count:
        return None, "kernels: there are none for what ranks computed here (on a GPU: --device cuda)"
    return f"kernels of {counted(count, 'module')}, against the plain operators of one device", None
