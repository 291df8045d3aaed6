"""All layers of a model as a GPU runner calls them: a decode step, which can be captured, and any other step.

by heads    fused layers (`fused_layers.py`); attention of a decode step is one kernel
latent      the model's own modules over `LatentCache`; single tokens use `latent_decode`
"""

from typing import Protocol

import torch
from torch import Tensor

from shardwise.kernels.cache_write import Turn, write_cache
from shardwise.kernels.decode_step import decode_step
from shardwise.kernels.step_inputs import StepInputs
from shardwise.nets.transformer import Transformer
from shardwise.serving.fused_layers import FusedLayers, can_be_fused
from shardwise.serving.kv_cache import HeadsCache, Inputs, KVCache, LatentCache, Spans, spans_of
from shardwise.serving.runner import Part
from shardwise.torch_private import hooks_of


class Layers(Protocol):
    """Computes a step: writes the keys and values of all tokens and returns logits."""

    block_size: int

    def decode(self, rows: StepInputs) -> Tensor:
        """Return the logits of one token per row, without waiting for the host. A row of length 0 is padding."""

    def mixed(self, inputs: Inputs, *, in_pieces: bool) -> Tensor:
        """Return the logits of the tokens that need them; with `in_pieces`, by piecewise graphs if there are any."""


def can_be_launched(model: Transformer, cache: KVCache) -> bool:
    """Whether a step can be launched without waiting, and captured: no hooks are attached to layers."""
    if isinstance(cache, HeadsCache):
        return can_be_fused(model)
    return isinstance(cache, LatentCache) and not any(map(hooks_of, model.layers.modules()))


def make_layers(
    model: Transformer, cache: KVCache, *, max_running: int, max_length: int, uses_graphs: bool, kernels: bool
) -> Layers:
    if isinstance(cache, LatentCache):
        return _LatentLayers(model, cache, kernels=kernels)
    assert isinstance(cache, HeadsCache), "a cache by heads, or a latent one"
    return _HeadsLayers(model, cache, max_running, max_length, uses_graphs=uses_graphs, kernels=kernels)


class _HeadsLayers:
    def __init__(
        self, model: Transformer, cache: HeadsCache, max_running: int, max_length: int, *, uses_graphs: bool,
        kernels: bool,
    ) -> None:  # fmt: skip
        num_kv_heads, self.block_size = cache.layer(0)[0].shape[1:3]
        self._layers = FusedLayers(model, cache, max_length, kernels=kernels, uses_graphs=uses_graphs)
        self._kernels = kernels
        # Allocated once, outside of every graph; each decode step leaves it zeroed.
        self._counters = torch.zeros(max_running * num_kv_heads, dtype=torch.int32, device=cache.data.device)

    def decode(self, rows: StepInputs) -> Tensor:
        def attend(
            product: Tensor, keys: Tensor, values: Tensor, turn: Turn, scale: float, window: int | None
        ) -> Tensor:
            return decode_step(
                product, keys, values, rows.tables, rows.lengths, turn, scale=scale, window=window,
                counters=self._counters, kernels=self._kernels,
            )  # fmt: skip

        return self._layers.logits(rows.tokens, rows.positions, attend, None)

    def mixed(self, inputs: Inputs, *, in_pieces: bool) -> Tensor:
        spans = spans_of(inputs.lengths, inputs.starts, inputs.tokens.device)

        def attend(
            product: Tensor, keys: Tensor, values: Tensor, turn: Turn, scale: float, window: int | None
        ) -> Tensor:
            query = write_cache(product, keys, values, inputs.positions, inputs.slots, turn, kernels=self._kernels)
            return spans.attend(query, keys, values, inputs.tables, scale, window, kernels=self._kernels)

        return self._layers.logits(inputs.tokens, inputs.positions, attend, inputs.wanted, in_pieces=in_pieces)


class _LatentLayers:
    def __init__(self, model: Transformer, cache: LatentCache, *, kernels: bool) -> None:
        self.block_size, self._cache = cache.block_size, cache
        cache.kernels = kernels
        self._part = Part(model, cache, range(model.settings.num_layers))

    def decode(self, rows: StepInputs) -> Tensor:
        count = len(rows.tokens)
        inputs = Inputs(
            tokens=rows.tokens, positions=rows.positions, tables=rows.tables,
            slots=torch.where(rows.slots < 0, self._cache.nowhere, rows.slots),
            lengths=[], starts=[0], wanted=torch.arange(count, device=rows.tokens.device),
        )  # fmt: skip
        spans = Spans(
            lengths=rows.lengths, starts=rows.lengths, tiles=rows.lengths[:0].view(0, 2), tile=1, num_single=count
        )
        self._cache.use(inputs, spans)
        return self._part.compute(inputs)

    def mixed(self, inputs: Inputs, *, in_pieces: bool) -> Tensor:  # noqa: ARG002 - it has no such graphs
        made: Tensor = self._part(inputs)
        return made
