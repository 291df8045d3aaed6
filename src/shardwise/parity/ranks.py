"""The same steps on one rank of a plan, as the engine runs them."""

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.fusion.fuse import has_kernels, num_with_kernels
from shardwise.nets.balance import correct_balance
from shardwise.parity.course import Course, Looks, Step, Uses, are_looked_at, own_names
from shardwise.parity.legs import Leg, one_leg
from shardwise.parity.problem import MakeProblem, Problem, clip_factor, small_matrices
from shardwise.parity.rows import BIAS_RATE, corrects
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses
from shardwise.units import counted

#: Breaks an engine that is ready to train.
Break = Callable[[Engine], None]


def engine_of(problem: Problem, plan: Plan, wires: ManyProcesses | None = None) -> Engine:
    """Return the engine of this rank for a problem, with its own wires if none are given."""
    return parallelize(
        problem.module, plan, loss=problem.loss, optimizer=problem.optimizer, example=problem.batches[0],
        clip=float("inf") if problem.clip is None else problem.clip, bucket_bytes=problem.bucket_bytes, wires=wires,
        **problem.options,
    )  # fmt: skip


def train_on_rank(
    plan: Plan,
    make: MakeProblem,
    broken: Break | None = None,
    looks: Looks = "every step",
    finds_uses: bool = True,
    legs: Sequence[Leg] | None = None,
) -> Course:
    """Train as one rank of a plan, in one leg or in several. With `finds_uses`, weights are recorded where they are
    used."""
    steps: list[Step] = []
    evaluations: dict[int, float] = {}
    saved: bytes | None = None
    with small_matrices():
        problem = make()
        shapes = {name: each.shape for name, each in problem.module.named_parameters()}
        legs = legs or one_leg(plan, len(problem.batches))
        for leg in legs:
            if saved is not None:
                problem = make()
                _spoil(problem.module)
            with engine_of(problem, leg.plan) as engine:
                if broken is not None:
                    broken(engine)
                training = _Training(problem, engine, looks, finds_uses=finds_uses)
                if saved is not None:
                    training.load(saved, leg.first)
                for number in range(leg.first, leg.stop):
                    steps.append(training.step(number))
                    if leg.evaluates(number):
                        evaluations[number] = engine.evaluate(problem.evaluated)
                if leg is legs[0]:
                    held, num_buckets, updated_by = _held(engine, shapes), _num_buckets(engine), training.updated_by
                    tensor = engine.sharded.tensor
                    num_kernels = _num_with_kernels(engine)
                saved = training.save() if leg is not legs[-1] else None
                digest = _digest(engine, steps)
    return Course(
        steps=steps,
        held=held,
        digest=digest,
        evaluations=evaluations,
        num_buckets=num_buckets,
        updated_by=updated_by,
        left_whole={} if tensor is None else dict(tensor.whole),
        num_with_kernels=num_kernels,
    )


@torch.no_grad()
def _spoil(module: nn.Module) -> None:
    """Change the weights of a module, so that any weight that is not loaded is noticed."""
    for each in dict.fromkeys(module.state_dict(keep_vars=True).values()):
        if isinstance(each, Tensor) and each.is_floating_point() and not each.is_meta:
            each.add_(0.5)


class _Training:
    """One leg of a training on this rank."""

    def __init__(self, problem: Problem, engine: Engine, looks: Looks, *, finds_uses: bool) -> None:
        self._problem, self._engine, self._looks, self._finds_uses = problem, engine, looks, finds_uses
        make = problem.scheduler
        self._schedulers = [] if make is None else [make(each) for each in engine.optimizers]
        self._balances = corrects(problem.module)

    def step(self, number: int) -> Step:
        """Train one step and record it."""
        engine, uses = self._engine, Uses()
        with uses.of(engine.module) if self._finds_uses else nullcontext():
            loss = engine.train_step(self._problem.batches[number])
        engine.flush()
        with warnings.catch_warnings():
            # If the host updates weights itself, the scheduler has not seen a call of `optimizer.step()`.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for each in self._schedulers:
                each.step()
        if self._balances:
            correct_balance(engine.module, BIAS_RATE, engine.expert_load())
        if not are_looked_at(self._looks, number, len(self._problem.batches)):
            return Step(loss=loss, norm=_norm(engine))
        return _step(engine, loss, uses.found, self._problem.clip)

    @property
    def updated_by(self) -> str:
        """The optimizers, in words."""
        every = self._engine.optimizers
        kinds = " and ".join(type(each).__name__ for each in every)
        rates = "" if not self._schedulers else f", rates by {type(self._schedulers[0]).__name__}"
        return f"{kinds} in {counted(sum(len(each.param_groups) for each in every), 'group')}{rates}"

    def save(self) -> bytes:
        """Return everything needed to resume the training, as the bytes of a file."""
        state = {
            "module": self._engine.state_dict(),
            "optimizers": self._engine.optimizer_state_dict(),
            "schedulers": [each.state_dict() for each in self._schedulers],
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes, step: int) -> None:
        """Resume from a saved state."""
        state = torch.load(io.BytesIO(saved), weights_only=False)  # What this process has written.
        self._engine.load_state_dict(state["module"])
        self._engine.load_optimizer_state_dict(state["optimizers"])
        for each, kept in zip(self._schedulers, state["schedulers"], strict=True):
            each.load_state_dict(kept)
        self._engine.num_steps = step


def _num_buckets(engine: Engine) -> int:
    return sum(bucket.gradients is not None for bucket in engine.states.data.buckets)


def _step(engine: Engine, loss: float, found: Mapping[str, Tensor], clip: float | None) -> Step:
    factor = clip_factor(_norm(engine), clip)
    used = _used_by_all(engine, found)
    return Step(
        loss=loss,
        norm=_norm(engine),
        gradients={name: each.detach().cpu() / factor for name, each in engine.gradients().items()},
        weights={name: each.cpu().clone() for name, each in _weights(engine).items() if isinstance(each, Tensor)},
        used={name: each.cpu() for name, each in engine.assembled(used).items()} if used else {},
    )


def _weights(engine: Engine) -> Mapping[str, Any]:
    """Return all state of the module. For 16-bit weights it is their masters, each once, which show small errors."""
    state, data = engine.state_dict(), engine.states.data
    if not (data.sharing.masters and any(each.dtype.itemsize < 4 for each in engine.module.parameters())):
        return state
    trained = [slot.name for bucket in data.buckets if bucket.master is not None for slot in bucket.layout.slots]
    masters = engine.assembled({name: data.wholes.kept(name) for name in trained})
    return {**{name: each for name, each in state.items() if name in own_names(engine.module)}, **masters}


def _used_by_all(engine: Engine, used: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `used` without weights that some rank holds but has not used: experts without tokens."""
    told: list[set[str]] = engine.wires.gather(engine.parameters.keys() - used.keys())
    return {name: each for name, each in used.items() if not any(name in missing for missing in told)}


def _norm(engine: Engine) -> float:
    assert engine.gradient_norm is not None, "gradients are clipped, so their norm is known"
    return engine.gradient_norm


def _digest(engine: Engine, steps: Sequence[Step]) -> str:
    """Return the digest of all losses and norms, and of every bit of the weights that this rank updates."""
    found = hashlib.sha256(repr([(step.loss, step.norm) for step in steps]).encode())
    for *_, each in engine.states.data.wholes.pieces():
        found.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _num_with_kernels(engine: Engine) -> int:
    has_them = has_kernels([next(iter(engine.parameters.values())).device]) if engine.parameters else False
    return num_with_kernels(engine.module) if has_them else 0


def _held(engine: Engine, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Return, for each parameter that this rank holds, its stages and the share of it that is here."""
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
