"""What ranks run in tests of expert parallelism. They are imported by the processes that `Ranks` starts."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.errors import ShardwiseError
from shardwise.execution.backward import input_gradients
from shardwise.execution.compute_policy import saving_nothing
from shardwise.nets.transformer import Output
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group, start_all_reduce
from shardwise.ranks.mesh import Mesh, make_mesh
from shardwise.sharding.expert import ExpertSharding, Placement, shard_experts
from shardwise.sharding.tensor import Sharding, shard
from shardwise.stages.split import split
from shardwise.stages.split.meta import meta_twin
from tests.sharding.expert.models import IGNORED, UNFIT, everyone_to_the_first, make_batch, make_model
from tests.stages.small import small_matrices


@dataclass
class Outcome:
    """How far a module with its experts shared out is from the whole one."""

    loss: float = 0.0
    worst: float = 0.0
    where: str = ""
    norm: float = 0.0
    missing: list[str] = field(default_factory=list)
    local_sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    load: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def loss_of(module: Callable[[Tensor], Any], batch: Mapping[str, Tensor], num_labels: int) -> Tensor:
    """This batch's part of the mean over all labels; a balancing loss weighs as a part of each label's."""
    output = module(batch["input_ids"])
    logits = output.logits if hasattr(output, "logits") else output
    total = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    if isinstance(output, Output):
        total = total + output.auxiliary * (batch["labels"] != IGNORED).sum()
    return total / num_labels


def part_of(batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The sequences of this replica."""
    size, rank = mesh.sizes["dp"], mesh.coordinates["dp"]
    return {key: each.chunk(size)[rank] for key, each in batch.items()}


def summed(tensor: Tensor, group: Group) -> Tensor:
    return start_all_reduce(tensor.detach().clone(), group).finish()


def finish(module: nn.Module, sharding: ExpertSharding) -> None:
    """Sum gradients over the ranks that hold the same parameter."""
    for name, each in module.named_parameters():
        if each.grad is not None:
            each.grad = summed(each.grad, sharding.gradients(name))


def parity(
    model: str, plan: str, to_the_first: bool = False, tensor: bool = False, over_tensor: bool = False
) -> Outcome:
    """Loss and gradients of a model on the ranks of the world, and on one device with the whole batch."""
    with small_matrices():
        mesh = make_mesh(Plan.parse(plan), experts_over_tp=over_tensor)
        module, batch = make_model(model), make_batch()
        if to_the_first:
            everyone_to_the_first(module)
        num_labels = int((batch["labels"] != IGNORED).sum())
        reference = copy.deepcopy(module)
        wanted = loss_of(reference, batch, num_labels)
        wanted.backward()  # type: ignore[no-untyped-call]
        example = {"input_ids": batch["input_ids"]}
        cut = shard(module, mesh, example=example, verify=False) if tensor else None
        sharding = shard_experts(module, mesh)
        sharding.group.traffic.clear()
        loss = loss_of(module, part_of(batch, mesh), num_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        outcome = Outcome(calls=dict(sharding.group.traffic.calls), bytes=dict(sharding.group.traffic.bytes))
        outcome.load = sharding.measured_load()
        outcome.loss = abs(float(summed(loss, mesh.group("dp")) / wanted) - 1)
        finish(module, sharding)
        if cut is not None:
            cut.finish_gradients(dict(module.named_parameters()))
        _compare(outcome, module, reference, mesh, sharding, cut)
        return outcome


def _compare(
    outcome: Outcome, module: nn.Module, reference: nn.Module, mesh: Mesh, sharding: ExpertSharding,
    cut: Sharding | None,
) -> None:  # fmt: skip
    expected, square, counted = dict(reference.named_parameters()), 0.0, torch.zeros(())
    for name, each in module.named_parameters():
        outcome.local_sizes[name] = tuple(each.shape)
        gradient = expected[name].grad
        assert gradient is not None, name
        if each.grad is None:
            outcome.missing.append(name)
            continue
        is_here_alone = sharding.over_tensor and name in sharding.parameters
        if sharding.gradients(name).rank == 0 and (is_here_alone or mesh.coordinates["tp"] == 0):
            counted += each.grad.square().sum()
        whole, value = sharding.gather(name, each.grad), sharding.gather(name, each.detach())
        if cut is not None:
            whole, value = cut.gather(name, whole), cut.gather(name, value)
        assert torch.equal(value, expected[name].detach()), name
        square += float(gradient.square().sum())
        error = float((whole - gradient).norm() / gradient.norm().clamp(min=1e-6))
        if error > outcome.worst:
            outcome.worst, outcome.where = error, name
    if cut is None:
        outcome.norm = abs(float(summed(counted, mesh.group("world"))) / square - 1)


def refused(model: str, plan: str, placements: dict[str, Placement] | None = None) -> str:
    """What is said of a model that cannot be shared out."""
    try:
        shard_experts(UNFIT[model](), make_mesh(Plan.parse(plan)), placements=placements)
    except ShardwiseError as error:
        return str(error)
    return ""


def in_stages(model: str, plan: str, on_meta: bool = False) -> Outcome:
    """The same in two stages, each forward twice, as when it is recomputed, and each backward in two halves."""
    with small_matrices():
        mesh, batch = make_mesh(Plan.parse(plan)), make_batch()
        module, reference = make_model(model), make_model(model)
        num_labels = int((batch["labels"] != IGNORED).sum())
        wanted = loss_of(reference, batch, num_labels)
        wanted.backward()  # type: ignore[no-untyped-call]
        if on_meta:
            module = meta_twin(module)
        sharding = shard_experts(module, mesh)
        part = part_of(batch, mesh)
        sharding.group.traffic.clear()
        first, second = split(module, 2, {"input_ids": part["input_ids"]}, only=() if on_meta else None).stages
        outcome = Outcome(calls=dict(sharding.group.traffic.calls))
        if on_meta:
            return outcome
        assert first is not None
        assert second is not None
        outcome = Outcome()
        with saving_nothing():
            first.run({}, part)
        made, _ = first.run({}, part)
        leaves = {key: each.detach().requires_grad_(each.requires_grad) for key, each in made.items()}
        _, output = second.run(leaves, part)
        loss = loss_of(lambda _: output, part, num_labels)
        asked = [key for key, each in leaves.items() if each.requires_grad]
        sharding.group.traffic.clear()
        late = input_gradients([loss], [None], [leaves[key] for key in asked])
        outcome.calls["I"] = sharding.group.traffic.calls["all_to_all"]
        late.run()
        outcome.calls["W"] = sharding.group.traffic.calls["all_to_all"] - outcome.calls["I"]
        input_gradients([made[key] for key in asked], [leaves[key].grad for key in asked], []).run()
        outcome.loss = abs(float(summed(loss, mesh.group("dp")) / wanted) - 1)
        finish(module, sharding)
        _compare(outcome, module, reference, mesh, sharding, None)
        return outcome
