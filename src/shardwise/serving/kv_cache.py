"""The bytes of the KV blocks, and attention over them. A block is contiguous, so that one copy moves it.

    by heads   a block is [layers, keys and values, heads, tokens, dim]
    latent     a block is [layers, tokens, latent vector and rotated key], as in DeepSeek's multi-head latent attention

The modules of `nets/` know nothing of blocks. They call a cache's `extend`, and attend with a function that is set on
them. Both are defined here, so the same modules are used for training and serving.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.choose import is_interpreted
from shardwise.kernels.latent_attention import absorb, latent_decode, rows_in_order
from shardwise.kernels.paged_attention import (
    attend_last,
    make_tiles,
    paged_attention_plain,
    paged_decode,
    paged_prefill,
    tile_of,
)
from shardwise.kernels.widen import widen
from shardwise.nets.block import Block
from shardwise.nets.latent import LatentAttention
from shardwise.nets.mask import AttentionMask
from shardwise.nets.settings import Heads, Latent, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One step's tokens, the sequences concatenated, and where their keys and values are written."""

    tokens: Tensor
    positions: Tensor
    #: For each token, block number and offset in the block as one number.
    slots: Tensor
    #: For each sequence a row of its blocks, padded with zeros.
    tables: Tensor
    #: For each sequence, how many of its tokens are in blocks after this step; and where it begins in `tokens`.
    lengths: list[int]
    starts: list[int]
    #: Indices of the tokens whose logits are wanted.
    wanted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Which queries belong to which sequence, on the device. The first `num_single` sequences have one query each."""

    lengths: Tensor
    starts: Tensor
    tiles: Tensor
    tile: int
    num_single: int

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, scale: float, window: int | None, *,
        kernels: bool = True,
    ) -> Tensor:  # fmt: skip
        """Attend with queries, [queries, heads, dim], over blocks."""
        single, lengths = self.num_single, self.lengths
        options: dict[str, Any] = {"scale": scale, "window": window, "kernels": kernels}
        if not len(self.tiles):
            return paged_decode(query, keys, values, tables, lengths, **options)
        made = query.new_empty(query.shape)
        if single:
            made[:single] = paged_decode(query[:single], keys, values, tables[:single], lengths[:single], **options)
        paged_prefill(query, keys, values, tables, lengths, self.starts, self.tiles, made, tile=self.tile, **options)
        return made


def spans_of(lengths: list[int], starts: list[int], device: torch.device) -> Spans:
    num_single = next((row for row in range(len(lengths)) if starts[row + 1] - starts[row] > 1), len(lengths))
    tile = tile_of(starts, num_single)
    tiles = make_tiles(starts, num_single, tile)
    numbers = torch.tensor(
        [*lengths, *starts, *(each for tile in tiles for each in tile)], dtype=torch.int32, device="cpu"
    )
    numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
    first, second = len(lengths), 2 * len(lengths) + 1
    return Spans(
        lengths=numbers[:first], starts=numbers[first:second], tiles=numbers[second:].view(-1, 2), tile=tile,
        num_single=num_single,
    )  # fmt: skip


class KVCache(Protocol):
    """The part of a cache that a runner uses."""

    data: Tensor
    inputs: Inputs

    def attach(self, layer: int, block: Block) -> None:
        """Make a block of the model write its keys and values to this cache, and attend to them."""


def block_bytes(settings: Settings, num_layers: int, dtype: torch.dtype, block_size: int, tp: int = 1) -> int:
    """Return the bytes of one block on a rank with this many layers and 1/`tp` of the heads."""
    sizes = settings.attention
    if isinstance(sizes, Latent):
        return num_layers * block_size * (sizes.kv_rank + sizes.rope_dim) * dtype.itemsize
    return num_layers * 2 * (sizes.num_kv_heads // tp) * block_size * sizes.head_dim * dtype.itemsize


def make_cache(
    settings: Settings,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    tp: int = 1,
) -> "HeadsCache | LatentCache":
    """Make the cache of a rank: its layers, counted from 0, and its heads."""
    size = block_bytes(settings, num_layers, dtype, block_size, tp)
    sizes = settings.attention
    # A latent cache has one more block, for tokens that are padding.
    data = _zeros(num_blocks + isinstance(sizes, Latent), size, device)
    if isinstance(sizes, Heads):
        shape = (num_layers, 2, sizes.num_kv_heads // tp, block_size, sizes.head_dim)
        return HeadsCache(data, data.view(dtype).view(num_blocks, *shape))
    numbers = data.view(dtype).view(num_blocks + 1, num_layers, block_size, sizes.kv_rank + sizes.rope_dim)
    return LatentCache(data[:num_blocks], numbers, sizes.kv_rank)


def _zeros(num_blocks: int, size: int, device: torch.device) -> Tensor:
    """Return the bytes of blocks, zero because what is masked must be finite. The host's pages are taken as they are
    first written, as `calloc` does: torch writes all of them now, 4 GiB in seconds.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_blocks, size), np.uint8))
    return torch.zeros(num_blocks, size, dtype=torch.uint8, device=device)


class _Steps:
    """A cache during a step: the step's inputs and, where needed, which queries belong to which sequence."""

    def __init__(self, data: Tensor, *, has_spans: bool) -> None:
        self.data, self._has_spans = data, has_spans
        self._inputs: Inputs | None = None
        self._spans: Spans | None = None

    @property
    def inputs(self) -> Inputs:
        assert self._inputs is not None, "a step has inputs"
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: Inputs) -> None:
        spans = spans_of(inputs.lengths, inputs.starts, self.data.device) if self._has_spans else None
        self.use(inputs, spans)

    def use(self, inputs: Inputs, spans: Spans | None) -> None:
        """Set inputs whose spans are known already."""
        self._inputs, self._spans = inputs, spans


class HeadsCache(_Steps):
    """Keys and values by heads."""

    def __init__(self, data: Tensor, numbers: Tensor) -> None:
        super().__init__(data, has_spans=data.is_cuda or is_interpreted())
        self._numbers, self._block_size = numbers, numbers.shape[4]

    def attach(self, layer: int, block: Block) -> None:
        block.attention.layer = layer
        block.attention.attend = partial(self._attend, layer)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each [blocks, heads, block size, dim]."""
        return self._numbers[:, layer, 0], self._numbers[:, layer, 1]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values, [1, heads, tokens, dim]."""
        slots, held = self.inputs.slots, self._numbers[:, layer]
        blocks, places = slots // self._block_size, slots % self._block_size
        held[blocks, 0, :, places] = key[0].transpose(0, 1)
        held[blocks, 1, :, places] = value[0].transpose(0, 1)
        return key, value

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float, _: float
    ) -> Tensor:
        del key, value  # They are in the blocks already, with those of earlier tokens.
        inputs, own = self.inputs, query[0].transpose(0, 1)
        if self._spans is not None:
            seen = self._spans.attend(own, *self.layer(layer), inputs.tables, scale, mask.window)
        else:
            seen = paged_attention_plain(
                own, *self.layer(layer), inputs.tables, inputs.lengths, inputs.starts, scale=scale, window=mask.window
            )
        return seen.transpose(0, 1)[None]


class LatentCache(_Steps):
    """One latent vector and one rotated key per token.

    A sequence with a single query attends to the latent vectors directly (weight absorption). A prompt has many queries
    per cached token, so keys and values by heads are computed once from the cached vectors. The last block of `numbers`
    belongs to no sequence.
    """

    def __init__(self, data: Tensor, numbers: Tensor, rank: int) -> None:
        super().__init__(data, has_spans=True)
        self._numbers, self._rank, self.block_size = numbers, rank, numbers.shape[2]
        #: The slot of padding tokens.
        self.nowhere = (len(numbers) - 1) * self.block_size
        self.kernels = True

    def attach(self, layer: int, block: Block) -> None:
        attention = block.attention
        assert isinstance(attention, LatentAttention), "attention by heads has a cache of its own"
        attention.layer, attention.attend_short = layer, partial(self._attend, layer, attention)

    def extend(self, layer: int, short: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Write this step's latent vectors, [1, tokens, rank], and rotated keys, [1, 1, tokens, dim]."""
        slots = self.inputs.slots
        row = torch.cat((short[0], turned[0, 0]), dim=-1)
        self._numbers[slots // self.block_size, layer, slots % self.block_size] = row
        return short, turned

    def _attend(
        self, layer: int, attention: LatentAttention, plain: Tensor, turned: Tensor, mask: AttentionMask
    ) -> Tensor:
        inputs, spans, sizes, held = self.inputs, self._spans, attention.sizes, self._numbers[:, layer]
        assert spans is not None, "a step has inputs"
        # [heads, key and value, rank]: the projection from latent vectors to keys and values.
        unfold = widen(attention.kv_b_proj.weight).view(-1, sizes.nope_dim + sizes.value_dim, self._rank)
        plain, turned = plain[0].transpose(0, 1), turned[0].transpose(0, 1)
        made, single = plain.new_empty(*plain.shape[:2], sizes.value_dim), spans.num_single
        if single:
            asked = torch.cat((absorb(plain[:single], unfold[:, : sizes.nope_dim]), turned[:single]), dim=-1)
            seen = latent_decode(
                asked, held, inputs.tables[:single], spans.lengths[:single],
                rank=self._rank, scale=attention.scale, window=mask.window, kernels=self.kernels,
            )  # fmt: skip
            made[:single] = absorb(seen, unfold[:, sizes.nope_dim :].transpose(1, 2))
        for sequence in range(single, len(inputs.lengths)):
            begin, end = inputs.starts[sequence : sequence + 2]
            rows = rows_in_order(held, inputs.tables[sequence], inputs.lengths[sequence])
            heads = torch.matmul(rows[:, : self._rank], unfold.transpose(1, 2))
            shared = rows[None, :, self._rank :].expand(len(heads), -1, -1)
            made[begin:end] = attend_last(
                torch.cat((plain[begin:end], turned[begin:end]), dim=-1),
                torch.cat((heads[..., : sizes.nope_dim], shared), dim=-1), heads[..., sizes.nope_dim :],
                scale=attention.scale, window=mask.window,
            )  # fmt: skip
        return made.transpose(0, 1)[None]
