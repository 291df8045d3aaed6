"""The same steps on one rank of a plan, as the engines run them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.parity.course import Course, Looks, Step, Uses, are_looked_at
from shardwise.parity.problem import CLIP, MakeProblem, Problem, clip_factor, make_optimizer, small_matrices
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses

#: Breaks an engine that is ready to train.
Break = Callable[[Engine], None]


def engine_of(problem: Problem, plan: Plan, wires: ManyProcesses | None = None) -> Engine:
    """The engine of this rank for a problem, over wires of its own if none are given."""
    return parallelize(
        problem.module, plan, loss=problem.loss, optimizer=make_optimizer, example=problem.batches[0], clip=CLIP,
        wires=wires, **problem.options,
    )  # fmt: skip


def train_on_rank(
    plan: Plan, make: MakeProblem, broken: Break | None = None, looks: Looks = "every step", finds_uses: bool = True
) -> Course:
    """Train as one rank of a plan. With `finds_uses`, weights are looked at where a forward uses them."""
    with small_matrices():
        problem = make()
        shapes = {name: each.shape for name, each in problem.module.named_parameters()}
        with engine_of(problem, plan) as engine:
            if broken is not None:
                broken(engine)
            steps = []
            for number, batch in enumerate(problem.batches):
                uses = Uses()
                with uses.of(engine.module) if finds_uses else nullcontext():
                    loss = engine.train_step(batch)
                engine.flush()
                sees = are_looked_at(looks, number, len(problem.batches))
                steps.append(_step(engine, loss, uses.found) if sees else Step(loss=loss, norm=_norm(engine)))
            return Course(steps=steps, held=_held(engine, shapes), digest=_digest(engine, steps))


def _step(engine: Engine, loss: float, found: Mapping[str, Tensor]) -> Step:
    factor = clip_factor(_norm(engine))
    used = _used_by_all(engine, found)
    return Step(
        loss=loss,
        norm=_norm(engine),
        gradients={name: each.detach().cpu() / factor for name, each in engine.gradients().items()},
        weights={name: each.cpu().clone() for name, each in engine.state_dict().items() if isinstance(each, Tensor)},
        used={name: each.cpu() for name, each in engine.assembled(used).items()} if used else {},
    )


def _used_by_all(engine: Engine, used: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what some rank holds a part of and has not used, and cannot give: experts that no token came to."""
    told: list[set[str]] = [engine.parameters.keys() - used.keys()]
    if dist.is_initialized():
        told *= dist.get_world_size()
        dist.all_gather_object(told, told[0])
    return {name: each for name, each in used.items() if not any(name in missing for missing in told)}


def _norm(engine: Engine) -> float:
    assert engine.gradient_norm is not None, "gradients are clipped, so their norm is known"
    return engine.gradient_norm


def _digest(engine: Engine, steps: Sequence[Step]) -> str:
    """Of all losses and norms, and of every bit of the weights that this rank updates."""
    found = hashlib.sha256(repr([(step.loss, step.norm) for step in steps]).encode())
    for *_, each in engine.states.data.wholes.pieces():
        found.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _held(engine: Engine, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """For each parameter that this rank holds: of which stages it is, and how much of it is here."""
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(engine.split.stages):
        for name in stage.parameters if stage is not None else ():
            stages.setdefault(name, []).append(number)
    return {
        name: f"{_numbered(stages[name])}, {_part(each.shape, shapes[name])}"
        for name, each in engine.parameters.items()
    }


def _numbered(stages: list[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages))


def _part(shape: torch.Size, whole: torch.Size) -> str:
    cuts = [
        f"{size} of {most} along dim {dim}"
        for dim, (size, most) in enumerate(zip(shape, whole, strict=True))
        if size != most
    ]
    return ", ".join(cuts) or "whole"
