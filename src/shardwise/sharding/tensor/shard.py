"""A module cut for tensor parallelism, in place: each rank keeps its piece of every layer that comes apart.

1. `tensor_plan.py`: what the user, or the model's own plan, asks for.
2. `channel_groups.py` (over `channel_rules.py`): one run without numbers shows which channels stay apart.
3. `regions.py`: from that, which layers are cut, and which places each rank gets.
4. Here: layers become `ColumnParallelLinear` (`columns.py`), `RowParallelLinear` (`rows.py`) and parts of a vocabulary
   (`vocabulary.py`); modules that count their heads are corrected (`head_attributes.py`). `communication.py` is what
   they send.
5. `sequence.py`, where asked: what lies between the regions is shared out along the sequence.
6. `trial.py`: one run of it without numbers, so that what does not fit is seen here.
7. `sharding.py`: where each parameter lies now.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.rng_tracker import Channels, RngTracker
from shardwise.sharding.tensor.channel_groups import ChannelTrace, trace
from shardwise.sharding.tensor.columns import ColumnParallelLinear, ColumnSet
from shardwise.sharding.tensor.experts import expert_runs, share_experts
from shardwise.sharding.tensor.head_attributes import correct, take_own_heads
from shardwise.sharding.tensor.regions import Found, Region, find_regions
from shardwise.sharding.tensor.rows import RowParallelLinear
from shardwise.sharding.tensor.sequence import SequenceRegions
from shardwise.sharding.tensor.sharding import Sharding
from shardwise.sharding.tensor.shards import Runs, Shards, even_runs
from shardwise.sharding.tensor.tensor_plan import TensorPlan, read_tensor_plan
from shardwise.sharding.tensor.trial import try_once
from shardwise.sharding.tensor.vocabulary import VocabularyHead, share_embedding
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import meta_twin
from shardwise.stages.stage import Batch
from shardwise.torch_private import parameter_slots, pytree


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
    cutter = _Cutter(module, group, num_chunks)
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
    try_once(module, *_arguments(module, example))
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
    layers = {name: each for name, each in twin.named_modules() if _is_layer(each) and _may_be_cut(name, each, plan)}
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
    inside_whole = any(
        kind == "whole" and (name == each or name.startswith(f"{each}.")) for each, kind in plan.kinds.items()
    )
    if inside_whole:
        return False
    return not plan.only or name in plan.kinds or (not plan.is_users and isinstance(module, nn.Embedding))


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D is a linear layer whose weight lies as (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


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


class _Cutter:
    """Cuts layers of one module, and keeps what became of each parameter."""

    def __init__(self, module: nn.Module, group: Group, num_chunks: int | None) -> None:
        self._module, self._group, self._num_chunks = module, group, num_chunks
        self._names = dict(module.named_parameters(remove_duplicate=False))
        self._made: dict[int, tuple[nn.Parameter, Shards]] = {}
        self._inside: set[int] = set()
        self._words: dict[int, int] = {}
        self.cut: dict[str, str] = {}
        self.notes: list[str] = []

    def shards(self) -> dict[str, Shards]:
        """Where each parameter lies, by all of its original names."""
        return {
            name: self._made[id(each)][1]
            if id(each) in self._made
            else Shards(shape=tuple(each.shape), is_partial=id(each) in self._inside)
            for name, each in self._names.items()
        }

    def cut_region(self, region: Region, seen: ChannelTrace) -> None:
        """Cut the columns and rows of a region."""
        group, rng = self._group, self._rng(region) if region.draws else None
        sets: list[tuple[Tensor, ColumnSet]] = []
        for name, runs in region.columns.items():
            layer = self._module.get_submodule(name)
            dim = 0 if isinstance(layer, nn.Linear) else 1
            self.cut[name] = f"outputs over {group.size} ranks: {_sizes(runs)}"
            if isinstance(layer, nn.Embedding):
                layer.weight = self._piece(_weight(layer), dim, runs)
                layer.embedding_dim = layer.weight.shape[1]
                continue
            read = seen.layers[name].inputs[0]
            together = next((each for tensor, each in sets if tensor is read), None)
            if together is None:
                together = ColumnSet(group, self._num_chunks)
                sets.append((read, together))
            weight, bias = self._pieces(layer, dim, runs)
            made = ColumnParallelLinear(weight, bias, together, is_transposed=dim == 1, rng=rng)
            self._put(name, made)
        for name, runs in region.rows.items():
            layer = self._module.get_submodule(name)
            dim = 1 if isinstance(layer, nn.Linear) else 0
            self.cut[name] = f"inputs over {group.size} ranks: {_sizes(runs)}"
            weight = self._piece(_weight(layer), dim, runs)
            made_of: dict[str, Any] = {"is_transposed": dim == 0, "rng": rng, "num_chunks": self._num_chunks}
            self._put(name, RowParallelLinear(weight, _bias(layer), group, **made_of))
        for name, (dim, runs) in region.cut_inside.items():
            self._piece(self._names[name], dim, runs)
            self.cut[name] = f"numbers over {group.size} ranks: {_sizes(runs)}"
        self._inside |= {id(self._names[name]) for name in region.inside}
        self._correct(region, seen)

    def _rng(self, region: Region) -> RngTracker:
        runs = next(iter(region.rows.values()))
        mine = tuple(place for start, stop in runs[self._group.rank] for place in range(start, stop))
        return RngTracker(self._group, Channels(mine, max(stop for some in runs for _, stop in some)))

    def _correct(self, region: Region, seen: ChannelTrace) -> None:
        """Correct the modules that hold a region's layers, if its pieces are heads."""
        if not is_by_heads(region, seen):
            return
        for name in dict.fromkeys(name.rpartition(".")[0] for name in [*region.columns, *region.rows]):
            holder = self._module.get_submodule(name)
            self.notes += [f"{name}.{each}" for each in correct(holder, region, self._group.rank)]
            if "alibi" in inspect.signature(holder.forward).parameters:
                take_own_heads(holder, "alibi", region, self._group.rank)

    def cut_head(self, name: str) -> None:
        """Share out the words that a layer scores."""
        layer = self._module.get_submodule(name)
        words = _weight(layer).shape[0]
        self._words[id(_weight(layer))] = words
        weight, bias = self._pieces(layer, 0, even_runs(words, self._group.size), pads=True)
        together = ColumnSet(self._group, self._num_chunks)
        made = VocabularyHead(weight, bias, together, is_transposed=False, rng=None)
        made.words = words
        self.cut[name] = f"vocabulary of {words} over {self._group.size} ranks"
        self._put(name, made)

    def cut_embeddings(self) -> None:
        """Share out the words of embeddings that are as many as a head scores."""
        counts = set(self._words.values())
        for name, each in list(self._module.named_modules()):
            if isinstance(each, nn.Embedding) and each.num_embeddings in counts and each.max_norm is None:
                words = each.num_embeddings
                runs = even_runs(words, self._group.size)
                each.weight = self._piece(_weight(each), 0, runs, pads=True)
                share_embedding(each, self._group, words)
                self.cut[name] = f"vocabulary of {words} over {self._group.size} ranks"

    def cut_experts(self, name: str, whole: dict[str, str]) -> None:
        """Cut the matrices of experts inside each expert."""
        experts = self._module.get_submodule(name)
        runs = expert_runs(experts, self._group.size)
        if isinstance(runs, str):
            whole[name] = runs
            return
        for key, (dim, each) in runs.items():
            setattr(experts, key, self._piece(experts.get_parameter(key), dim, each))
            self.cut[f"{name}.{key}"] = f"channels of each expert over {self._group.size} ranks: {_sizes(each)}"
        share_experts(experts, self._group)

    def mark_partial(self, names: Collection[str]) -> None:
        """Parameters that are used on a piece of the sequence: each rank's gradient is a part."""
        for name in names:
            if id(self._names[name]) not in self._made:
                self._inside.add(id(self._names[name]))

    def tie_again(self) -> None:
        """Put pieces wherever else the module holds what they are pieces of."""
        for each in self._module.modules():
            for key, held in parameter_slots(each).items():
                if held is not None and id(held) in self._made:
                    parameter_slots(each)[key] = self._made[id(held)][0]

    def _pieces(
        self, layer: nn.Module, dim: int, runs: tuple[Runs, ...], *, pads: bool = False
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        bias = _bias(layer)
        return (
            self._piece(_weight(layer), dim, runs, pads=pads),
            None if bias is None else self._piece(bias, 0, runs, pads=pads),
        )

    def _piece(self, whole: nn.Parameter, dim: int, runs: tuple[Runs, ...], *, pads: bool = False) -> nn.Parameter:
        """This rank's piece of a parameter. One that several layers share stays one."""
        if id(whole) not in self._made:
            held = sum(stop - start for some in runs for start, stop in some)
            shards = Shards(
                shape=tuple(whole.shape),
                dim=dim,
                runs=runs,
                padded=-(-whole.shape[dim] // self._group.size) if pads else None,
                is_partial=held > whole.shape[dim],
            )
            piece = shards.local(whole.detach(), self._group.rank).clone()
            self._made[id(whole)] = nn.Parameter(piece, requires_grad=whole.requires_grad), shards
        return self._made[id(whole)][0]

    def _put(self, name: str, layer: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        layer.train(self._module.get_submodule(name).training)
        setattr(self._module.get_submodule(parent), key, layer)


def is_by_heads(region: Region, seen: ChannelTrace) -> bool:
    """Whether the pieces of a region are heads, of several channels each."""
    return region.fine[0][1] not in {len(seen.layers[name].read[0]) for name in region.rows}


def _weight(layer: nn.Module) -> nn.Parameter:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter), f"the weight of {type(layer).__name__} is no parameter"
    return weight


def _bias(layer: nn.Module) -> nn.Parameter | None:
    return parameter_slots(layer).get("bias")


def _sizes(runs: tuple[Runs, ...]) -> str:
    return " + ".join(str(sum(stop - start for start, stop in some)) for some in runs)
