"""Shard a module's experts over the ranks of a mesh."""

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.expert.balance import Real, share_balance, share_capacity
from shardwise.sharding.expert.calls import observe
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.sharding.expert.layers import ExpertLayer, attach, find_layers, find_others
from shardwise.sharding.expert.placement import Placement
from shardwise.sharding.expert.sharding import ExpertSharding
from shardwise.sharding.expert.trial import try_all, why_tied
from shardwise.stages.split.materialise import replace
from shardwise.stages.split.meta import meta_twin
from shardwise.stages.split.python_state import leaves_classes
from shardwise.stages.stage import Batch


@leaves_classes
def shard_experts(
    module: nn.Module, mesh: Mesh, *, placements: Mapping[str, Placement] | None = None, overlap: bool = True,
    real: Real = lambda: None, verify: bool = True, example: Batch | None = None,
) -> ExpertSharding:  # fmt: skip
    """Keep only this rank's experts, in place, and dispatch tokens to other ranks. All ranks must call this together.

    Call it for every module with experts that has replicas, even if ep is 1: a balancing loss is over the tokens of all
    replicas. `placements` are keyed by the names of the experts; other layers are placed evenly. `overlap`: rows travel
    while the shared expert is computed. `real` returns which tokens of a sequence are not padding. Unless `verify` is
    False, experts that are not ours are tried first (`trial.py`): as they are called with `example`, if one is given.
    """
    group, replicas = mesh.group("ep"), mesh.group("gradients")
    layers, others = find_layers(module), find_others(module)
    skips: dict[str, bool] = {}
    if group.size > 1:
        others |= why_tied(module, layers)
        layers = [each for each in layers if each.name not in others]
    if verify and group.size > 1:
        theirs = [each for each in layers if not each.is_ours]
        calls = observe(module, theirs, example)
        verdicts = try_all(theirs, calls)
        others |= {name: found.problem for name, found in verdicts.items() if found.problem}
        skips = {name: found.skips for name, found in verdicts.items()}
        layers = [each for each in layers if each.name not in others]
    _check(module, mesh, layers, others)
    chosen = _choose(layers, placements or {}, group.size)
    twin = meta_twin(module)
    # Experts may be sharded over tensor parallel ranks too, which all have the same tokens.
    over_tensor = len({rank % mesh.sizes["tp"] for rank in mesh.ranks("ep")}) > 1
    alike = mesh.group("tp") if over_tensor else None
    dispatches: dict[str, Dispatch] = {}
    parameters: dict[str, str] = {}
    for layer in layers:
        if layer.is_ours:
            share_balance(layer.block, replicas, real)
            share_capacity(layer.block, mesh.group("dp"), mesh.group("cp"), real)
        if group.size > 1:
            dispatches[layer.name] = Dispatch(
                group, chosen[layer.name], alike, name=layer.name, skips=skips.get(layer.name, True)
            )
            parameters |= {f"{layer.name}.{key}": layer.name for key, _ in layer.experts.named_parameters()}
            _keep(module, layer, chosen[layer.name].ranks[group.rank])
            attach(layer, dispatches[layer.name], overlap=overlap)
    return ExpertSharding(
        group=group,
        same=mesh.group("expert_gradients"),
        replicas=replicas,
        layers=dispatches,
        parameters=parameters,
        whole=others,
        over_tensor=over_tensor,
        twin=twin,
    )


@torch.no_grad()
def _keep(module: nn.Module, layer: ExpertLayer, mine: tuple[int, ...]) -> None:
    for each in list(layer.experts.parameters()):
        replace(module, each, each.detach().index_select(0, torch.tensor(mine, device=each.device)))


def _check(module: nn.Module, mesh: Mesh, layers: list[ExpertLayer], others: Mapping[str, str]) -> None:
    """Refuse experts that cannot be sharded, before anything is changed."""
    _check_count(module, mesh.group("ep").size, layers, others)
    config = getattr(module, "config", None)
    if mesh.group("gradients").size > 1 and getattr(config, "output_router_logits", False):
        raise ShardwiseError(
            f"{type(module).__name__} computes its balancing loss from the tokens of one rank, and there are"
            f" {mesh.group('gradients').size} replicas: their mean is not the loss of one device",
            remedy="config.output_router_logits = False, or shardwise.nets with Mixture(auxiliary=...)",
        )


def check_experts(module: nn.Module, ep: int) -> None:
    """Refuse a module without an expert for every rank, before there are ranks."""
    _check_count(module, ep, find_layers(module), find_others(module))


def _check_count(module: nn.Module, ep: int, layers: list[ExpertLayer], others: Mapping[str, str]) -> None:
    if ep > 1 and not layers:
        name, why = next(iter(others.items()), ("", ""))
        reason = f"of {name}, {why}" if name else "none were found"
        raise ShardwiseError(
            f"{type(module).__name__} has no experts for ep={ep} to share out: {reason}", remedy="ep=1"
        )
    for layer in layers:
        if layer.num_experts < ep:
            raise ShardwiseError(
                f"{layer.name} has {layer.num_experts} experts, and ep={ep} ranks cannot each have one",
                remedy=f"ep={layer.num_experts}",
            )


def _choose(layers: list[ExpertLayer], placements: Mapping[str, Placement], num_ranks: int) -> dict[str, Placement]:
    """Return the placement of every layer: the requested one, or an even one."""
    even = {layer.name: Placement.even(layer.num_experts, num_ranks) for layer in layers}
    for name, placement in placements.items():
        if name not in even:
            raise unknown("layer of experts", name, even)
        if len(placement.order) != len(even[name].order) or len(placement.ranks) != num_ranks:
            raise ShardwiseError(
                f"the placement of {name} is of {len(placement.order)} experts on {len(placement.ranks)} ranks,"
                f" but there are {len(even[name].order)} on {num_ranks}",
                remedy=f"Placement.even({len(even[name].order)}, {num_ranks})",
            )
    return even | dict(placements)
