"""What ranks run in tests of experts that move: steps of training, with and without moves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import make_mesh
from shardwise.sharding.expert import ExpertSharding, Placement, move, rebalance, shard_experts
from tests.sharding.expert.models import IGNORED, make_batch, make_model
from tests.sharding.expert.programs import finish, loss_of, part_of, summed
from tests.stages.small import small_matrices

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": lambda some: AdamW(some, lr=0.01, weight_decay=0.1),
    "sgd": lambda some: SGD(some, lr=0.05, momentum=0.9),
    "adafactor": lambda some: Adafactor(some, lr=0.01),
}


@dataclass
class Training:
    """Losses of the steps; weights and optimizer state at the end, whole, and whether they were the same before and
    after a move; placements, loads, and what was moved."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    loads: dict[str, list[int]] = field(default_factory=dict)
    move_bytes: int = 0
    is_same: bool = False


def train(model: str, plan: str, optimizer: str, how: str, num_steps: int = 4) -> Training:
    """Train; before the third step experts are left alone, swapped by hand, or placed by their load."""
    with small_matrices():
        mesh, module, batch = make_mesh(Plan.parse(plan)), make_model(model), make_batch()
        num_labels = int((batch["labels"] != IGNORED).sum())
        sharding = shard_experts(module, mesh)
        chosen: Optimizer = OPTIMIZERS[optimizer](module.parameters())
        found = Training()
        for step in range(num_steps):
            if step == 2:
                sharding.group.traffic.clear()
                before = _whole(sharding, module, chosen)
                _move(how, sharding, module, chosen, found)
                found.move_bytes = sharding.group.traffic.bytes["all_to_all"]
                after = _whole(sharding, module, chosen)
                found.is_same = before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values()))
            chosen.zero_grad()
            loss = loss_of(module, part_of(batch, mesh), num_labels)
            loss.backward()  # type: ignore[no-untyped-call]
            finish(module, sharding)
            chosen.step()
            found.losses.append(float(summed(loss, mesh.group("dp"))))
        found.loads = sharding.measured_load()
        found.state = _whole(sharding, module, chosen)
        found.placements = {name: each.placement for name, each in sharding.layers.items()}
        return found


def _whole(sharding: ExpertSharding, module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, and what the optimizer knows of them, gathered."""
    found = {}
    for name, each in module.named_parameters():
        found[name] = sharding.gather(name, each.detach()).clone()
        for key, value in optimizer.state[each].items():
            if isinstance(value, Tensor) and value.dim():
                found[f"{name} {key}"] = sharding.gather(name, value).clone()
    return found


def _move(how: str, sharding: ExpertSharding, module: nn.Module, optimizer: Optimizer, found: Training) -> None:
    if how == "swap":
        backwards = {}
        for name, each in sharding.layers.items():
            order = list(reversed(each.placement.order))
            sizes = each.placement.sizes
            starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
            backwards[name] = Placement(tuple(tuple(order[at : at + n]) for at, n in zip(starts, sizes, strict=True)))
        move(sharding, module, backwards, optimizers=[optimizer])
    if how == "by load":
        found.moved = rebalance(sharding, module, optimizers=[optimizer])


def with_other_sizes() -> None:
    module, mesh = make_model("ours like mixtral"), make_mesh(Plan.parse("dp=2,ep=2"))
    sharding = shard_experts(module, mesh)
    with torch.no_grad():
        move(sharding, module, {"layers.0.mlp.experts": Placement(((0,), tuple(range(1, 8))))})


def with_an_unknown_layer() -> None:
    module, mesh = make_model("ours like mixtral"), make_mesh(Plan.parse("dp=2,ep=2"))
    move(shard_experts(module, mesh), module, {"layers.0.mlp.expert": Placement.even(8, 2)})
