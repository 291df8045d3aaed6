"""A transformer with experts trained by an engine that moves them between steps, and one that does not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.parity.models import default_settings, problem_of
from shardwise.planner.plan import Plan
from tests.stages.small import small_matrices

NUM_STEPS = 3
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": lambda some: AdamW(some, lr=1e-2, eps=1e-4),
    "adafactor": lambda some: Adafactor(some, lr=1e-2),
}


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    moved: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)


def in_halves(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16)


def half_frozen(module: nn.Module) -> nn.Module:
    for name, each in module.named_parameters():
        each.requires_grad_(not name.endswith("experts.up_proj"))
    return module


def as_it_is(module: nn.Module) -> nn.Module:
    return module


def train(text: str, optimizer: str, moves: bool, change: Callable[[nn.Module], nn.Module] = as_it_is) -> Run:
    """Train a few steps; after each, experts may move to where the load is even."""
    plan, found = Plan.parse(text), Run()
    with small_matrices():
        problem = problem_of(
            replace(default_settings(replace(plan, ep=2)), num_layers=max(2, plan.pp)), plan, NUM_STEPS
        )()
        engine = parallelize(
            change(problem.module), plan, loss=problem.loss, optimizer=OPTIMIZERS[optimizer], example=problem.batches[0]
        )
        assert isinstance(engine, Engine), "a plan with experts has a mesh"
        for batch in problem.batches:
            found.losses.append(engine.train_step(batch))
            if moves:
                found.moved += sum(engine.rebalance_experts(gain=0.0).values())
        found.weights = {name: each.clone().float() for name, each in engine.state_dict().items()}
        states = engine.optimizer_state_dict()["state"]
        found.states = {f"{name} {key}": each for name, state in states.items() for key, each in state.items()}
        engine.close()
    return found
