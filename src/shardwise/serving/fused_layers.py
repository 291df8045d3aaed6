"""The layers of a transformer computed for serving: the modules' own weights, in fewer and larger steps.

    hidden ─ add, norm ─ q k v in one product ─ norms, positions, write ─ attention over blocks ─ o
           ─ add, norm ─ gate and up in one product ─ gate x up ─ down ─

Weights of one product lie one behind the other; the modules keep theirs as parts of it, so nothing is held twice.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwise.kernels.cache_write import Turn, write_cache
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.narrow import NarrowWeight
from shardwise.kernels.row_linear import row_linear
from shardwise.nets.attention import Attention
from shardwise.nets.block import Block
from shardwise.nets.feedforward import FeedForward
from shardwise.nets.moe import MoE
from shardwise.nets.norm import add_normed, normed
from shardwise.nets.transformer import Transformer
from shardwise.serving.kv_cache import HeadsCache
from shardwise.serving.narrow_weights import NarrowLinear
from shardwise.torch_private import hooks_of

#: Attention of a step: queries, keys and values of a layer's blocks, the scale of logits, and the window.
Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]


def can_be_fused(model: Transformer) -> bool:
    """Whether all layers are plain ones by heads: nothing hangs on them, and none of them is another's part."""
    return all(
        isinstance(layer, Block) and type(layer.attention) is Attention and not any(map(hooks_of, layer.modules()))
        for layer in model.layers
    )


class FusedLayers:
    """All layers of a model over a cache by heads."""

    def __init__(self, model: Transformer, cache: HeadsCache, max_length: int, *, kernels: bool = True) -> None:
        self.model, self.kernels = model, kernels
        cosine = sine = None
        if model.rotary is not None:
            # A row for each position: looked up by the kernel in place of being computed in every step.
            every = torch.arange(max_length, device=model.embed.weight.device)
            cosine, sine = (each.contiguous() for each in model.rotary(every))
        self._layers = [
            _FusedLayer(block, cache, number, model, cosine, sine)  # type: ignore[arg-type]
            for number, block in enumerate(model.layers)
        ]

    def logits(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend, wanted: Tensor | None) -> Tensor:
        """Of the wanted tokens, or of all, [wanted, vocabulary]; keys and values of all go to their slots."""
        model = self.model
        hidden, residual = model.embed(tokens), None
        if model.positions is not None:
            hidden = hidden + model.positions(positions)
        for layer in self._layers:
            hidden, residual = layer.forward(hidden, residual, positions, slots, attend, self.kernels)
        if wanted is not None:
            hidden, residual = hidden[wanted], None if residual is None else residual[wanted]
        if len(hidden) == 1 and isinstance(model.norm, nn.RMSNorm):
            norm, eps = model.norm.weight, model.norm.eps or 0.0
            return row_linear(
                hidden, model.head.weight, residual=residual, norm=norm, eps=eps, kernels=self.kernels
            )[0]  # fmt: skip
        given, _ = _added(model.norm, hidden, residual, self.kernels)
        made: Tensor = model.head(given)
        return made


class _FusedLayer:
    def __init__(
        self,
        block: Block,
        cache: HeadsCache,
        number: int,
        model: Transformer,
        cosine: Tensor | None,
        sine: Tensor | None,
    ) -> None:
        attention, settings = block.attention, model.settings
        assert isinstance(attention, Attention), "latent attention has a cache of its own"
        self._block, self._o = block, attention.o_proj
        self._keys, self._values = cache.layer(number)
        self._window = settings.window if settings.is_windowed(number) else None
        self._scale = attention.head_dim**-0.5
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        norms = attention.q_norm, attention.k_norm
        self._turn = Turn(
            cosine=cosine,
            sine=sine,
            interleaved=attention.interleaved,
            q_norm=None if norms[0] is None else norms[0].weight,
            k_norm=None if norms[1] is None else norms[1].weight,
            epsilon=settings.norm_epsilon,
        )
        self._mlp = block.mlp
        self._gate_up = None
        if isinstance(block.mlp, FeedForward) and block.mlp.gate_proj is not None:
            self._gate_up = _joined(block.mlp.gate_proj, block.mlp.up_proj)
        #: Whether it is of RMS norms and products alone.
        self._is_plain = self._gate_up is not None and settings.norm == "rms"

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, slots: Tensor, attend: Attend, kernels: bool
    ) -> tuple[Tensor, Tensor]:
        """What the layer adds to the residual, [tokens, width], and the residual without it."""
        if self._is_plain and len(hidden) == 1:
            return self._one_row(hidden, residual, positions, slots, attend, kernels)
        given, residual = _added(self._block.attention_norm, hidden, residual, kernels)
        query = write_cache(
            few_rows_linear(given, *self._qkv, kernels=kernels),
            self._keys, self._values, positions, slots, self._turn, kernels=kernels,
        )  # fmt: skip
        seen = attend(query, self._keys, self._values, self._scale, self._window)
        attended = _product(self._o, seen.flatten(1), kernels)
        given, residual = _added(self._block.mlp_norm, attended, residual, kernels)
        return self._feed_forward(given, kernels), residual

    def _one_row(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, slots: Tensor, attend: Attend, kernels: bool
    ) -> tuple[Tensor, Tensor]:
        """The same of one token: norms and gates are parts of the products, which are the time that it takes."""
        attention_norm, mlp_norm, mlp = self._block.attention_norm, self._block.mlp_norm, self._mlp
        assert isinstance(mlp, FeedForward), "an MLP with a gate"
        assert isinstance(attention_norm, nn.RMSNorm), "a plain layer has RMS norms"
        assert isinstance(mlp_norm, nn.RMSNorm), "a plain layer has RMS norms"
        assert self._gate_up is not None, "an MLP with a gate"
        eps = attention_norm.eps or 0.0
        product, residual = row_linear(
            hidden, *self._qkv, residual=residual, norm=attention_norm.weight, eps=eps, kernels=kernels
        )
        query = write_cache(product, self._keys, self._values, positions, slots, self._turn, kernels=kernels)
        seen = attend(query, self._keys, self._values, self._scale, self._window).flatten(1)
        attended, _ = row_linear(seen, self._o.weight, self._o.bias, kernels=kernels)
        inner, residual = row_linear(
            attended, *self._gate_up, residual=residual, norm=mlp_norm.weight, eps=eps, activation=mlp.activation,
            kernels=kernels,
        )  # fmt: skip
        return row_linear(inner, mlp.down_proj.weight, mlp.down_proj.bias, kernels=kernels)[0], residual

    def _feed_forward(self, given: Tensor, kernels: bool) -> Tensor:
        mlp = self._mlp
        if isinstance(mlp, MoE):
            output: Tensor = mlp(given[None])[0][0]
            return output
        if self._gate_up is None:
            made: Tensor = mlp(given)
            return made
        assert isinstance(mlp, FeedForward), "an MLP with a gate"
        inner = few_rows_linear(given, *self._gate_up, activation=mlp.activation, kernels=kernels)
        return _product(mlp.down_proj, inner, kernels)


def _product(layer: nn.Module, given: Tensor, kernels: bool) -> Tensor:
    """By the module itself where it is no plain linear layer."""
    if type(layer) in (nn.Linear, NarrowLinear):
        return few_rows_linear(given, layer.weight, layer.bias, kernels=kernels)  # type: ignore[arg-type]
    made: Tensor = layer(given)
    return made


def _added(norm: nn.Module, hidden: Tensor, residual: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
    if residual is None:
        return normed(norm, hidden, kernels=kernels), hidden
    return add_normed(norm, hidden, residual, kernels=kernels)


def _joined(*layers: nn.Linear | NarrowLinear) -> tuple[Tensor | NarrowWeight, Tensor | None]:
    """Weights and biases of layers that are given the same, each in one piece; the layers have parts of it."""
    has_bias = all(isinstance(layer.bias, Tensor) for layer in layers)
    bias = _in_one([layer.bias for layer in layers]) if has_bias else None
    narrow = [layer.narrow for layer in layers if isinstance(layer, NarrowLinear)]
    if narrow:
        assert len(narrow) == len(layers), "layers of one product are narrow, or none of them is"
        codes, scales = (_in_one([getattr(each, name) for each in narrow]) for name in ("codes", "scales"))
        return replace(narrow[0].weight, codes=codes, scales=scales), bias
    return _in_one([layer.weight for layer in layers if isinstance(layer, nn.Linear)]), bias


def _in_one(parts: list[Tensor]) -> Tensor:
    first, count = parts[0], sum(len(part) for part in parts)
    follows = (
        one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in pairwise(parts)
    )
    if all(part.is_contiguous() for part in parts) and all(follows):  # Joined by an engine before this one.
        return first.data.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    begin = 0
    for part in parts:
        part.data = whole[begin : begin + len(part)]
        begin += len(part)
    return whole
