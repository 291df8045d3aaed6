"""The part of a model that one rank has: some layers (pp), some heads and channels of each (tp), some experts (ep).

    tp   rows of q, k, v, gate and up; columns of o and down; the outputs of attention and MLP are all-reduced
    ep   contiguous groups of experts; every rank has all tokens and computes those of its experts; then an all-reduce
    pp   contiguous layers; the embedding with the first stage, the head with the last

Only what a rank has is read and allocated. The rest of its module stays on the meta device.
"""

import math
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.block import Block
from shardwise.nets.experts import Experts
from shardwise.nets.moe import MoE
from shardwise.nets.settings import Heads, Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import shapes_of
from shardwise.planner.plan import largest_divisor

#: The dim of a weight that is sharded over tensor parallel ranks.
_ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of the model a rank has. Ranks of one stage have consecutive numbers."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    rank: int = 0
    #: Layers of each stage; None: as even as possible.
    counts: tuple[int, ...] | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.ep

    @property
    def stage(self) -> int:
        return self.rank // (self.tp * self.ep)

    @property
    def inner(self) -> int:
        """The number of this rank within its stage."""
        return self.rank % (self.tp * self.ep)

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage; the first stages have one more if they do not divide evenly."""
        if self.counts is not None:
            begin = sum(self.counts[: self.stage])
            return range(begin, begin + self.counts[self.stage])
        each, over = divmod(num_layers, self.pp)
        begin = self.stage * each + min(self.stage, over)
        return range(begin, begin + each + (self.stage < over))

    def has(self, name: str, settings: Settings) -> bool:
        """Whether a weight is on this rank, in whole or in part."""
        first, _, rest = name.partition(".")
        if first == "layers":
            return int(rest.partition(".")[0]) in self.layers(settings.num_layers)
        is_first, is_last = self.stage == 0, self.stage == self.pp - 1
        if first == "embed":
            return is_first or (settings.tied and is_last)
        return is_first if first == "positions" else is_last

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return this rank's slice of a weight."""
        whole = [slice(0, size) for size in shape]
        is_expert = ".experts." in name
        kind = name.rpartition(".")[2] if is_expert else name.split(".")[-2]
        if is_expert and self.ep > 1:
            whole[0] = _part(shape[0], self.inner, self.ep)
        elif self.tp > 1 and name.startswith("layers.") and kind in _ROWS:
            dim = 2 if is_expert else 0
            whole[dim] = _part(shape[dim], self.inner, self.tp)
        elif self.tp > 1 and name.startswith("layers.") and kind in _COLUMNS and len(shape) > 1:
            whole[1] = _part(shape[1], self.inner, self.tp)
        return tuple(whole)


def check_shard(settings: Settings, shard: Shard) -> None:
    """Refuse a model that cannot be sharded this way."""
    if shard.tp > 1 and shard.ep > 1:
        raise ShardwiseError("serving splits a layer by tp or by ep, not by both", remedy="tp=2, or ep=2")
    if shard.pp > settings.num_layers:
        raise ShardwiseError(
            f"pp={shard.pp} is more than {settings.num_layers} layers", remedy=f"pp={settings.num_layers}"
        )
    if shard.counts is not None and (sum(shard.counts) != settings.num_layers or 0 in shard.counts):
        text = "+".join(map(str, shard.counts))
        raise ShardwiseError(
            f"layers={text} is {sum(shard.counts)} layers, and the model has {settings.num_layers}, and each stage"
            " needs at least one",
            remedy="layers= with their sum, or without it",
        )
    counts = {"heads": settings.attention.num_heads, "channels of the MLP": settings.mlp.width}
    if isinstance(settings.attention, Heads):
        counts["KV heads"] = settings.attention.num_kv_heads
    if settings.mixture is not None:
        counts["channels of an expert"] = settings.mixture.width
    for what, count in counts.items():
        if count % shard.tp:
            most = largest_divisor(math.gcd(*counts.values()), shard.tp)
            raise ShardwiseError(
                f"tp={shard.tp} does not divide {count} {what}", remedy=f"tp={most}" if most > 1 else "pp= instead"
            )
    num_experts = 0 if settings.mixture is None else settings.mixture.num_experts
    if shard.ep > 1 and not num_experts:
        raise ShardwiseError(f"ep={shard.ep}, and the model has no experts", remedy="tp= or pp= instead")
    if shard.ep > 1 and num_experts % shard.ep:
        most = largest_divisor(num_experts, shard.ep)
        raise ShardwiseError(
            f"ep={shard.ep} does not divide {num_experts} experts",
            remedy=f"ep={most}" if most > 1 else "tp= or pp= instead",
        )


def make_shard(settings: Settings, shard: Shard, dtype: torch.dtype) -> tuple[Transformer, list[str]]:
    """Make the module of a rank on the meta device, with weights of its part's size, and the names of its weights."""
    with torch.device("meta"):
        model = Transformer(settings)
    names = [name for name in shapes_of(settings) if shard.has(name, settings)]
    for name, parameter in model.named_parameters():
        part = parameter.data[shard.slices(name, tuple(parameter.shape))]
        parameter.data = torch.empty_like(part, dtype=dtype)
    return model, names


def connect(model: Transformer, shard: Shard, group: dist.ProcessGroup | None) -> None:
    """Add all-reduces over the ranks of a stage where a layer is sharded; biases of what is summed count once."""
    if shard.tp > 1:
        for layer in shard.layers(model.settings.num_layers):
            block = model.layers[layer]
            assert isinstance(block, Block), "layers are blocks"
            for cut in (block.attention, block.mlp):
                cut.register_forward_hook(lambda _module, _given, made: _summed(made, group))
            for each in block.modules():
                for kind in _COLUMNS:
                    linear = getattr(each, kind, None)
                    if shard.inner and isinstance(linear, nn.Linear) and _has_bias(linear):
                        nn.init.zeros_(linear.bias)
    if shard.ep > 1:
        for each in model.modules():
            if isinstance(each, MoE):
                each.exchange = _Exchange(shard, group)


class _Waits:
    """All-reduces over ranks, and the seconds this one spent in them: mostly it waits there for the others."""

    seconds = 0.0

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        begun = perf_counter()
        dist.all_reduce(tensor, group=group)
        self.seconds += perf_counter() - begun


#: Of this process.
shard_waits = _Waits()


class _Exchange:
    """Computes the rows of this rank's experts; the other rows come from the other ranks by the all-reduce."""

    def __init__(self, shard: Shard, group: dist.ProcessGroup | None) -> None:
        self._shard, self._group = shard, group

    def __call__(
        self, experts: Experts, rows: Tensor, counts: Tensor, meanwhile: "object"
    ) -> tuple[Tensor, Tensor | None]:
        here = _part(len(counts), self._shard.inner, self._shard.ep)
        ends = [0, *counts.cumsum(0).tolist()]
        mine = slice(ends[here.start], ends[here.stop])
        made = torch.zeros_like(rows)
        made[mine] = experts(rows[mine], counts[here])
        shard_waits.all_reduce(made, self._group)
        assert callable(meanwhile), "what is computed beside the experts"
        return made, meanwhile()


def _summed(made: Tensor | tuple[Tensor, Tensor | None], group: dist.ProcessGroup | None) -> object:
    output = made if isinstance(made, Tensor) else made[0]
    output = output.contiguous()
    shard_waits.all_reduce(output, group)
    return output if isinstance(made, Tensor) else (output, made[1])


def _has_bias(linear: nn.Linear) -> bool:
    return isinstance(linear.bias, Tensor)


def _part(size: int, place: int, num_places: int) -> slice:
    each = size // num_places
    return slice(place * each, (place + 1) * each)
