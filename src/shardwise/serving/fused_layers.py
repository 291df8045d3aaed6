"""The layers of a transformer for serving: the modules' own weights, in fewer and larger operations.

    hidden ─ add, norm ─ q k v in one product ─ norms, positions, write, attention over blocks ─ o
           ─ add, norm ─ gate and up in one product ─ gate x up ─ down ─

The weights of a joint product are stored contiguously; the modules keep views of them, so nothing is stored twice.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.cache_write import Turn
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.narrow import NarrowWeight
from shardwise.kernels.row_linear import row_linear
from shardwise.nets.attention import Attention
from shardwise.nets.block import Block
from shardwise.nets.feedforward import FeedForward
from shardwise.nets.moe import MoE
from shardwise.nets.norm import add_normed, normed
from shardwise.nets.settings import Heads
from shardwise.nets.transformer import Transformer
from shardwise.serving.kv_cache import HeadsCache
from shardwise.serving.narrow_weights import NarrowLinear
from shardwise.serving.prompt_graphs import PromptGraphs
from shardwise.torch_private import hooks_of

#: Kinds of weights for which products of one row use the few-rows kernel, with separate norms before them. With 4 bits
#: a layer's products took an 8B model 97 us this way (H200, measured alone, 16 rows). With the one-row kernel it is
#: about 115 us, derived from the time of a step: the two were not timed side by side (`benchmarks/decode_settings.py`).
BY_FEW = ("int4",)

#: Attention of a step. Arguments: queries, keys and values as the product has them; keys and values of a layer's
#: blocks; the transformation applied to the former before they are written to the latter; the logit scale; the window.
Attend = Callable[[Tensor, Tensor, Tensor, Turn, float, int | None], Tensor]


def can_be_fused(model: Transformer) -> bool:
    """Whether all layers are plain blocks with attention by heads, without hooks."""
    return all(
        isinstance(layer, Block) and type(layer.attention) is Attention and not any(map(hooks_of, layer.modules()))
        for layer in model.layers
    )


class FusedLayers:
    """All layers of a model over a cache of keys and values by heads."""

    def __init__(
        self, model: Transformer, cache: HeadsCache, max_length: int, *, kernels: bool = True, uses_graphs: bool = False
    ) -> None:
        self.model, self.kernels = model, kernels
        cosine = sine = None
        if model.rotary is not None:
            # One row per position, which the kernel looks up instead of computing it in every step.
            every = torch.arange(max_length, device=model.embed.weight.device)
            cosine, sine = (each.contiguous() for each in model.rotary(every))
        self._layers = [
            _FusedLayer(block, cache, number, model, cosine, sine)  # type: ignore[arg-type]
            for number, block in enumerate(model.layers)
        ]
        self.num_pieces = len(self._layers) + 1
        self.graphs: PromptGraphs | None = None
        if uses_graphs and all(layer.is_plain for layer in self._layers):
            sizes = model.settings.attention
            assert isinstance(sizes, Heads), "layers by heads"
            self.graphs = PromptGraphs(
                width=model.settings.width, seen_width=sizes.num_heads * sizes.head_dim, like=model.embed.weight
            )

    def logits(
        self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None, *, in_pieces: bool = False
    ) -> Tensor:
        """Return logits of the wanted tokens, or of all, [wanted, vocabulary]. Writes the keys and values of all."""
        model = self.model
        residual: Tensor | None = None
        hidden: Tensor = model.embed(tokens)
        if model.positions is not None:
            hidden = hidden + model.positions(positions)
        run_piece = self.graphs.runner(self, len(tokens)) if self.graphs is not None and in_pieces else self.run_piece
        for number, layer in enumerate(self._layers):
            product, residual = run_piece(number, hidden, residual)
            hidden = layer.attend(attend, product)
        hidden, residual = run_piece(len(self._layers), hidden, residual)
        if wanted is not None:
            hidden, residual = hidden[wanted], residual[wanted]
        if len(hidden) == 1 and isinstance(model.norm, nn.RMSNorm):
            return row_linear(
                hidden, model.head.weight, residual=residual, **_of(model.norm), kernels=self.kernels
            )[0]  # fmt: skip
        given, _ = _added(model.norm, hidden, residual, self.kernels)
        made: Tensor = model.head(given)
        return made

    def run_piece(self, number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the operations between the previous layer's attention and this layer's (`prompt_graphs.py`)."""
        if number:
            assert residual is not None, "what the first layer was given"
            given, residual = self._layers[number - 1].after(given, residual, self.kernels)
        if number < len(self._layers):
            return self._layers[number].before(given, residual, self.kernels)
        assert residual is not None, "there is a layer"
        return given, residual


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
        #: Whether it consists of RMS norms and linear products only.
        self.is_plain = self._gate_up is not None and settings.norm == "rms"
        self._kind = self._qkv[0].kind if isinstance(self._qkv[0], NarrowWeight) else None

    def before(self, hidden: Tensor, residual: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values, concatenated, and the residual, from the previous layer's output."""
        norm = self._block.attention_norm
        if self._goes_by_row(hidden):
            # For one token, norms and gates are fused into the products, which dominate its time.
            return row_linear(hidden, *self._qkv, residual=residual, **_of(norm), kernels=kernels)
        given, residual = _added(norm, hidden, residual, kernels)
        return few_rows_linear(given, *self._qkv, kernels=kernels), residual

    def _goes_by_row(self, given: Tensor) -> bool:
        """Whether norms and gates are fused into one-row products for this input."""
        return self.is_plain and len(given) == 1 and self._kind not in BY_FEW

    def attend(self, attend: Attend, product: Tensor) -> Tensor:
        return attend(product, self._keys, self._values, self._turn, self._scale, self._window).flatten(1)

    def after(self, seen: Tensor, residual: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to the residual, [tokens, width], and the residual without it."""
        norm, mlp = self._block.mlp_norm, self._mlp
        if self._goes_by_row(seen):
            assert isinstance(mlp, FeedForward), "an MLP with a gate"
            assert self._gate_up is not None, "an MLP with a gate"
            attended, _ = row_linear(seen, self._o.weight, self._o.bias, kernels=kernels)
            inner, residual = row_linear(
                attended, *self._gate_up, residual=residual, **_of(norm), activation=mlp.activation, kernels=kernels
            )
            return row_linear(inner, mlp.down_proj.weight, mlp.down_proj.bias, kernels=kernels)[0], residual
        given, residual = _added(norm, _product(self._o, seen, kernels), residual, kernels)
        return self._feed_forward(given, kernels), residual

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
    """Compute a product with our kernel, or with the module itself if it is not a plain linear layer."""
    if type(layer) in (nn.Linear, NarrowLinear):
        return few_rows_linear(given, layer.weight, layer.bias, kernels=kernels)  # type: ignore[arg-type]
    made: Tensor = layer(given)
    return made


def _of(norm: nn.Module) -> dict[str, Any]:
    """Return an RMS norm as the arguments of a fused product."""
    assert isinstance(norm, nn.RMSNorm), "a plain layer has RMS norms"
    return {"norm": norm.weight, "eps": norm.eps or 0.0}


def _added(norm: nn.Module, hidden: Tensor, residual: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
    if residual is None:
        return normed(norm, hidden, kernels=kernels), hidden
    return add_normed(norm, hidden, residual, kernels=kernels)


def _joined(*layers: nn.Linear | NarrowLinear) -> tuple[Tensor | NarrowWeight, Tensor | None]:
    """Join weights and biases of layers that share their input, each contiguously; the layers keep views of them."""
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
    if all(part.is_contiguous() for part in parts) and all(follows):  # An earlier engine has joined them.
        return first.data.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    begin = 0
    for part in parts:
        part.data = whole[begin : begin + len(part)]
        begin += len(part)
    return whole
