"""A transformer whose routers are corrected by the load of all ranks after every step."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.nets.balance import correct_balance
from shardwise.nets.settings import Mixture, Settings
from shardwise.parity.models import batch_of, default_settings, length_for, problem_of, rows_for
from shardwise.planner.plan import Plan
from tests.stages.small import small_matrices

NUM_STEPS, RATE = 3, 0.05


@dataclass
class Balanced:
    """Loads of every step, and at the end the correction of each layer that is here."""

    losses: list[float] = field(default_factory=list)
    loads: list[dict[str, list[int]]] = field(default_factory=list)
    corrections: dict[str, Tensor] = field(default_factory=dict)


def settings_for(plan: Plan) -> Settings:
    """Like DeepSeek-V3: sigmoids, groups, a correction; the first layer is dense."""
    settings = default_settings(plan)
    mixture = Mixture(
        num_experts=8,
        num_chosen=2,
        width=32,
        num_shared=1,
        scores="sigmoid",
        correction=True,
        num_groups=2,
        num_chosen_groups=1,
        dense_layers=(0,),
    )
    return replace(settings, mixture=mixture)


def train(text: str, like: str | None = None) -> Balanced:
    """Train with a plan, on the batches of another one if that is given."""
    plan, shaped, found = Plan.parse(text), Plan.parse(like or text), Balanced()
    with small_matrices():
        problem = problem_of(settings_for(shaped), shaped, 1)()
        batches = [batch_of(rows_for(shaped), length_for(shaped), 257, step) for step in range(NUM_STEPS)]
        engine = parallelize(
            problem.module,
            plan,
            loss=problem.loss,
            optimizer=lambda some: torch.optim.SGD(some, lr=0.1),
            example=batches[0],
            clip=1.0,
        )
        assert like is None or isinstance(engine, Engine), "one device is this process alone"
        with engine:
            for batch in batches:
                found.losses.append(engine.train_step(batch))
                engine.evaluate(batch)
                load = engine.expert_load()
                correct_balance(engine.module, RATE, load)
                found.loads.append(load)
            assert not any(map(sum, engine.expert_load().values())), "loads begin at 0 again"
            found.corrections = {
                name: each.clone() for name, each in engine.module.named_buffers()
                if name.endswith("correction") and not each.is_meta
            }  # fmt: skip
    return found
