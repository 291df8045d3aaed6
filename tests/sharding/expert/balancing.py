"""What ranks run in tests of balance, of precision, and of weights made from nothing."""

import copy

import torch
from torch import Tensor
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.nets.moe import MoE
from shardwise.nets.router import balancing_loss as of_one_device
from shardwise.nets.routes import count_choices
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import make_mesh
from shardwise.sharding.expert import shard_experts
from shardwise.sharding.expert.balance import balancing_loss
from shardwise.stages.split.materialise import materialise
from shardwise.stages.split.meta import meta_twin
from tests.sharding.expert.models import IGNORED, everyone_to_the_first, make_batch, make_model
from tests.sharding.expert.programs import loss_of, part_of, summed
from tests.stages.small import small_matrices


def losses_of_uneven_parts(weights: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The balancing loss and the scores' gradient, where ranks have 5 and 11 tokens and weigh differently; and those of
    one device."""
    mesh = make_mesh(Plan.parse("dp=2"))
    torch.manual_seed(0)
    layer = make_model("ours like deepseek").get_submodule("layers.1.mlp")
    assert isinstance(layer, MoE)
    choice = layer.router(torch.randn(16, 32))
    scores = choice.scores.detach().requires_grad_()
    wanted = of_one_device(choice._replace(scores=scores), count_choices(choice.experts, 8))
    (gradient,) = torch.autograd.grad(wanted, scores)
    mine = slice(0, 5) if mesh.rank == 0 else slice(5, 16)
    part = scores.detach()[mine].requires_grad_()
    found = balancing_loss(choice.experts[mine], part, mesh.group("gradients"))
    (slope,) = torch.autograd.grad(found * weights[mesh.rank], part)
    return found.detach(), wanted.detach(), slope, gradient[mine]


def in_bfloat16(model: str) -> tuple[float, float, int]:
    """The loss where experts compute in bfloat16 and some have nothing to do, on ranks and on one device; and bytes."""
    with small_matrices():
        mesh, module, batch = make_mesh(Plan.parse("dp=2,ep=2")), make_model(model), make_batch()
        everyone_to_the_first(module)
        num_labels = int((batch["labels"] != IGNORED).sum())
        with torch.autocast("cpu", torch.bfloat16):
            wanted = loss_of(module, batch, num_labels)
            sharding = shard_experts(module, mesh)
            sharding.group.traffic.clear()
            loss = loss_of(module, part_of(batch, mesh), num_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(summed(loss, mesh.group("dp"))), float(wanted), sharding.group.traffic.bytes["all_to_all"]


def made_from_nothing(model: str) -> list[str]:
    """Parameters whose numbers are not those of the whole module, where an engine makes each rank's from the seed."""
    module = meta_twin(make_model(model))
    whole = copy.deepcopy(module)
    materialise(whole, [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())], seed=3)
    engine = parallelize(
        module,
        "dp=2,ep=2",
        loss=lambda output, batch: (output.logits.square().sum(), batch["input_ids"].numel()),
        optimizer=SGD,
        example=make_batch(),
        seed=3,
    )
    with engine:
        assert engine.experts is not None
        assert len(engine.experts.parameters) > 0
        made = engine.state_dict()
        return [name for name, each in whole.named_parameters() if not made[name].equal(each)]


def alone() -> tuple[Tensor, Tensor]:
    """One process without any group."""
    module, batch = make_model("ours like deepseek"), make_batch()
    wanted = module(batch["input_ids"]).logits
    sharding = shard_experts(module, make_mesh(Plan()))
    assert sharding.group.size == Group().size == 1
    assert not sharding.parameters
    assert sharding.measured_load() == {}
    return module(batch["input_ids"]).logits, wanted
