"""Replace the layers of one module by this rank's pieces, and record how each parameter is sharded."""

import inspect
import re
from collections.abc import Callable, Collection
from copy import copy
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.sharding.rng_tracker import Channels, RngTracker
from shardwise.sharding.tensor.channel_groups import ChannelTrace
from shardwise.sharding.tensor.experts import expert_runs, share_experts
from shardwise.sharding.tensor.linear import ColumnParallelLinear, ColumnSet, RowParallelLinear
from shardwise.sharding.tensor.plain_layers import keep_attributes
from shardwise.sharding.tensor.regions import Found, Region
from shardwise.sharding.tensor.sequence import SequenceRegions
from shardwise.sharding.tensor.sharding import Runs, Shards, even_runs
from shardwise.sharding.tensor.vocabulary import VocabularyHead, share_embedding
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.torch_private import parameter_slots


def cut(
    module: nn.Module, group: Group, found: Found, seen: ChannelTrace, *, sequence: bool, num_chunks: int | None
) -> "LayerCutter":
    """Cut a module in place, as `found` says."""
    cutter = LayerCutter(module, group, num_chunks)
    for region in found.regions:
        cutter.cut_region(region, seen)
    for name in found.heads:
        cutter.cut_head(name)
    cutter.cut_embeddings(found.whole)
    for name in found.experts:
        cutter.cut_experts(name, found.whole)
    cutter.tie_again()
    if sequence:
        by_heads = [name for region in found.regions if is_by_heads(region, seen) for name in region.columns]
        regions = SequenceRegions(module, group, seen, by_heads)
        regions.share()
        cutter.mark_partial(regions.partial)
    return cutter


class LayerCutter:
    """Cuts layers of one module, and records how each parameter is sharded."""

    def __init__(self, module: nn.Module, group: Group, num_chunks: int | None) -> None:
        self._module, self._group, self._num_chunks = module, group, num_chunks
        self._names = dict(module.named_parameters(remove_duplicate=False))
        self._made: dict[int, tuple[nn.Parameter, Shards]] = {}
        self._inside: set[int] = set()
        #: Whether there are dropouts that drop nothing so far.
        self._rests = any(isinstance(each, nn.Dropout) and not (each.p and each.training) for each in module.modules())
        self._words: dict[int, int] = {}
        self.cut: dict[str, str] = {}
        self.notes: list[str] = []

    def shards(self) -> dict[str, Shards]:
        """Return the shards of each parameter, by all of its original names."""
        return {
            name: self._made[id(each)][1]
            if id(each) in self._made
            else Shards(shape=tuple(each.shape), is_partial=id(each) in self._inside)
            for name, each in self._names.items()
        }

    def cut_region(self, region: Region, seen: ChannelTrace) -> None:
        """Cut the columns and rows of a region."""
        group, rng = self._group, self._rng(region) if region.draws or (self._rests and region.rows) else None
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
            self._put(name, ColumnParallelLinear(weight, bias, together, is_transposed=dim == 1, rng=rng))
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
        channels = Channels(mine, max(stop for some in runs for _, stop in some))
        return RngTracker(self._group, channels, draws=region.draws)

    def _correct(self, region: Region, seen: ChannelTrace) -> None:
        """Correct the head counts of modules that hold a region's layers, if its pieces are heads."""
        if not is_by_heads(region, seen):
            return
        for name in dict.fromkeys(name.rpartition(".")[0] for name in [*region.columns, *region.rows]):
            holder = self._module.get_submodule(name)
            width = len(seen.layers[next(iter(region.rows))].read[0])
            self.notes += [f"{name}.{each}" for each in _correct_heads(holder, region, self._group.rank, width)]
            if "alibi" in inspect.signature(holder.forward).parameters:
                _take_own_heads(holder, "alibi", region, self._group.rank)

    def cut_head(self, name: str) -> None:
        """Shard the vocabulary of an output head."""
        layer = self._module.get_submodule(name)
        words = _weight(layer).shape[0]
        self._words[id(_weight(layer))] = words
        weight, bias = self._pieces(layer, 0, even_runs(words, self._group.size), pads=True)
        together = ColumnSet(self._group, self._num_chunks)
        made = VocabularyHead(weight, bias, together, is_transposed=False, rng=None)
        made.words, made.waits = words, bool(getattr(layer, "waits", False))
        self.cut[name] = f"vocabulary of {words} over {self._group.size} ranks"
        self._put(name, made)

    def cut_embeddings(self, whole: Collection[str]) -> None:
        """Shard the vocabulary of embeddings that have as many words as an output head."""
        counts = set(self._words.values())
        for name, each in list(self._module.named_modules()):
            if isinstance(each, nn.Embedding) and each.num_embeddings in counts and name not in whole:
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
        """Mark parameters that are used on a piece of the sequence: each rank's gradient is a partial sum."""
        for name in names:
            if id(self._names[name]) not in self._made:
                self._inside.add(id(self._names[name]))

    def tie_again(self) -> None:
        """Put pieces wherever else the module holds the original parameter (tied weights)."""
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
        """Return this rank's piece of a parameter. Layers that share a parameter share its piece."""
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
            made = nn.Parameter(piece, requires_grad=whole.requires_grad)
            vars(made).update(vars(whole))  # The user's attributes: `weight.no_decay = True`.
            self._made[id(whole)] = made, shards
        return self._made[id(whole)][0]

    def _put(self, name: str, layer: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        keep_attributes(self._module.get_submodule(name), layer)
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


_KEYS = re.compile(r"(num|n)_(key_value|kv)_heads?")
_GROUPS = re.compile(r"(num|n)_(key_value|kv)_groups")
_QUERIES = re.compile(r"(num|n)_(attention_|query_|q_)?heads?|heads|all_head_size|inner_dim|split_size")


def _correct_heads(module: nn.Module, region: Region, rank: int, width: int) -> list[str]:
    """Correct the head counts that a module with columns or rows of a region stores; return the changes as text.

    Most modern modules leave the number of heads open in their views. Others store counts and widths of all heads.
    These are recognised by name, or guessed by value (`Region.guess`), and scaled to this rank's share.
    """
    if region.guess == "none":
        return []
    queries, keys = Fraction(*region.fine[rank]), Fraction(*region.coarse[rank])
    guessed = {"names": (), "heads": (region.fine[rank][1],), "widths": (region.fine[rank][1], width)}[region.guess]
    named = _corrected_heads(vars(module), queries, keys)
    for key, value in vars(module).items():
        if type(value) is int and value in guessed and (value * queries).denominator == 1:
            named.setdefault(key, int(value * queries))
    changed = []
    for key, value in named.items():
        changed.append(f"{key} {getattr(module, key)} -> {value}")
        setattr(module, key, value)
    config = getattr(module, "config", None)
    if config is not None:
        corrected = _corrected_heads(vars(config), queries, keys)
        if corrected:
            # All modules share one configuration; this module gets its own copy.
            module.config = copy(config)
            for key, value in corrected.items():
                setattr(module.config, key, value)
    return changed


def _corrected_heads(values: dict[str, Any], queries: Fraction, keys: Fraction) -> dict[str, int]:
    found = {}
    for name, value in values.items():
        if type(value) is not int:
            continue
        factor = keys if _KEYS.fullmatch(name) else queries / keys if _GROUPS.fullmatch(name) else None
        if factor is None and _QUERIES.fullmatch(name):
            factor = queries
        if factor is not None and factor != 1 and (value * factor).denominator == 1:
            found[name] = int(value * factor)
    return found


def _take_own_heads(module: nn.Module, name: str, region: Region, rank: int) -> None:
    """Pass a module only its heads of an argument that has one row for every head of every sequence."""
    first = sum(count for count, _ in region.fine[:rank])
    count, all_heads = region.fine[rank]

    def wrapped(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(name)
        if isinstance(given, Tensor):
            kwargs[name] = given.view(-1, all_heads, *given.shape[1:])[:, first : first + count].flatten(0, 1)
        return call(*args, **kwargs)

    wrap_forward(module, wrapped)
