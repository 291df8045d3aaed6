"""A module cut for tensor parallelism, in place: each rank keeps its piece of every layer that comes apart.

1. `tensor_plan.py`: what the user, or the model's own plan, asks for.
2. `channel_groups.py` (over `channel_rules.py`): one run without numbers shows which channels stay apart.
3. `regions.py`: from that, which layers are cut, and which places each rank gets.
4. `cut_layers.py`: layers become `ColumnParallelLinear`, `RowParallelLinear` (`linear.py`) and parts of a vocabulary
   (`vocabulary.py`); modules that count their heads are corrected. What they send is in `communication.py`.
5. `sequence.py`, where asked: what lies between the regions is shared out along the sequence.
6. Here: one run of it without numbers, so that a module which counts on all of its channels says so before training.
7. `sharding.py`: where each parameter lies now.
"""

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.tensor.channel_groups import ChannelTrace, trace
from shardwise.sharding.tensor.cut_layers import LayerCutter, is_by_heads
from shardwise.sharding.tensor.linear import ParallelLinear
from shardwise.sharding.tensor.regions import Found, find_regions
from shardwise.sharding.tensor.sequence import SequenceRegions
from shardwise.sharding.tensor.sharding import Sharding, Shards
from shardwise.sharding.tensor.tensor_plan import TensorPlan, read_tensor_plan
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.stage import Batch
from shardwise.torch_private import pytree


def shard(
    module: nn.Module,
    over: Mesh | Group,
    spec: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    example: Batch | None = None,
    num_chunks: int | None = None,
) -> Sharding:
    """Cut a module over the ranks of a group, in place. All of its ranks call this with the same module.

    `spec` names layers and what they are to be (see `tensor_plan.py`); without it the model's own plan is followed, or
    what is found in one run on `example`. `sequence`: norms, dropout and residuals are shared out along the sequence.
    What a layer sends goes in `num_chunks`, while others of them are computed, or in as many as its size is worth.
    """
    if num_chunks is not None and num_chunks < 1:
        raise ShardwiseError(
            f"tensor_chunks={num_chunks}: what a layer sends is one chunk or more",
            remedy="tensor_chunks=1, or none, for as many as pay",
        )
    group = over.group("tp") if isinstance(over, Mesh) else over
    twin = meta_twin(module)
    names = dict.fromkeys(name for name, _ in module.named_parameters(remove_duplicate=False))
    if group.size == 1:
        shapes = {name: Shards(shape=tuple(module.get_parameter(name).shape)) for name in names}
        return Sharding(group=group, shards=shapes, twin=twin)
    plan = read_tensor_plan(module, spec)
    found, seen = find(twin, plan, group.size, example)
    if plan.is_users:
        _check_named(plan, found)
    cutter = LayerCutter(module, group, num_chunks)
    for region in found.regions:
        cutter.cut_region(region, seen)
    for name in found.heads:
        cutter.cut_head(name)
    cutter.cut_embeddings()
    for name in plan.experts:
        cutter.cut_experts(name, found.whole)
    cutter.tie_again()
    if sequence:
        by_heads = [name for region in found.regions if is_by_heads(region, seen) for name in region.columns]
        regions = SequenceRegions(module, group, seen, by_heads)
        regions.share()
        cutter.mark_partial(regions.partial)
    _try_once(module, *_arguments(module, example))
    return Sharding(
        group=group,
        shards=cutter.shards(),
        whole=found.whole,
        notes=tuple(cutter.notes),
        cut=cutter.cut,
        twin=twin,
    )


def find(twin: nn.Module, plan: TensorPlan, num_ranks: int, example: Batch | None) -> tuple[Found, ChannelTrace]:
    """What of a module, given without numbers, is to be cut, and the run that showed it."""
    layers = {name: each for name, each in twin.named_modules() if _may_be_cut(name, each, plan)}
    args, kwargs = _arguments(twin, example)

    def again(labelled: Mapping[str, int]) -> ChannelTrace:
        return trace(twin, layers, args, kwargs, labelled=labelled)

    try:
        seen = trace(twin, layers, args, kwargs)
    except Exception as error:
        raise ShardwiseError(
            f"{type(twin).__name__} does not run on the meta device, so what can be cut is not found: {error}",
            remedy="a forward that does not look at numbers, or tp=1",
        ) from error
    rows = [name for name, kind in plan.kinds.items() if kind == "row"] if plan.only else None
    said = [name for name, kind in plan.kinds.items() if kind == "vocabulary"]
    heads = [name for name in said if isinstance(layers.get(name), nn.Linear)]
    return find_regions(seen, again, num_ranks, rows=rows, heads=heads), seen


def _may_be_cut(name: str, module: nn.Module, plan: TensorPlan) -> bool:
    # Hugging Face's Conv1D is a linear layer whose weight lies as (inputs, outputs).
    is_transposed = type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
    wholes = [each for each, kind in plan.kinds.items() if kind == "whole"]
    if not isinstance(module, (nn.Linear, nn.Embedding)) and not is_transposed:
        return False
    if any(name == each or name.startswith(f"{each}.") for each in wholes):
        return False
    return not plan.only or name in plan.kinds or (not plan.is_users and isinstance(module, nn.Embedding))


def _arguments(twin: nn.Module, example: Batch | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example on the meta device. A Hugging Face model needs none."""
    if example is None:
        config = getattr(twin, "config", None)
        if config is None or not hasattr(config, "vocab_size"):
            raise ShardwiseError(
                f"without an example there is no way to see what of {type(twin).__name__} can be cut",
                remedy="shard(module, group, example={...}), with one microbatch",
            )
        tokens = torch.zeros(1, 4, dtype=torch.long)
        example = {"input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False):
            example = {**example, "decoder_input_ids": tokens}
    args, kwargs = Signature(twin).arguments(example)
    on_meta: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda each: each.detach().to("meta") if isinstance(each, Tensor) else each, (args, kwargs)
    )
    return on_meta


def _check_named(plan: TensorPlan, found: Found) -> None:
    """Every layer that the user named is cut as said, or the user is told why not."""
    columns = {name for region in found.regions for name in region.columns}
    rows = {name for region in found.regions for name in region.rows}
    done = {"column": columns, "row": rows, "vocabulary": set(found.heads), "whole": set(plan.kinds)}
    for name, kind in plan.kinds.items():
        if name not in done[kind] and kind != "vocabulary":
            why = found.whole.get(name, f"it is a {'row' if kind == 'column' else 'column'} of what is found")
            raise ShardwiseError(f"{name} cannot be a {kind}: {why}", remedy=f'tensor={{"{name}": "whole"}}')


def _try_once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a copy of a cut module, with arguments on the meta device. Nothing is sent."""
    twin = meta_twin(module)
    try:
        with torch.no_grad(), Guesses():  # type: ignore[no-untyped-call]
            twin(*args, **kwargs)
    except Exception as error:
        holder = _find_holder(twin, error)
        layers = ".".join("*" if part.isdecimal() else part for part in holder.split("."))
        raise ShardwiseError(
            f"{holder or type(module).__name__} cannot do with a part of its channels: {error}",
            remedy=f'tensor={{"{layers}": "whole"}}, or tp=1' if holder else "tp=1",
        ) from error


def _find_holder(twin: nn.Module, error: Exception) -> str:
    """Of the modules that ran when an error was raised, the innermost that has cut layers; "" if none has."""
    names: dict[nn.Module, str] = {each: name for name, each in twin.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and any(isinstance(each, ParallelLinear) for each in running.children()):
            return names.get(running, "")
    return ""
