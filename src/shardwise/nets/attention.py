"""Multi-head attention: every query head has its own keys and values (MHA), or several share them (GQA)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.rotary import rotary
from shardwise.nets.cache import Cache
from shardwise.nets.mask import AttentionMask
from shardwise.nets.rotary import Rotation
from shardwise.nets.settings import Heads, Settings
from shardwise.torch_private import is_watched

#: Maps queries, keys, values (each [batch, heads, tokens, dim]), the mask, the scale of the logits and the dropout
#: probability to outputs. Context parallelism replaces it: each attention module has one as `attend`.
Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask, float, float], Tensor]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attend on one device, with torch's best kernel."""
    if mask.starts is not None:
        return attend_in_sequences(query, key, value, mask.starts, mask.window, scale)
    num_sharing = query.shape[1] // key.shape[1]
    if mask.dense is not None and num_sharing > 1:
        # Kernels that take a mask require as many key heads as query heads.
        key, value = key.repeat_interleave(num_sharing, 1), value.repeat_interleave(num_sharing, 1)
    with fastest_first(query) if mask.dense is None else nullcontext():
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask.dense,
            dropout_p=dropout,
            is_causal=mask.dense is None and query.shape[2] > 1,
            scale=scale,
            enable_gqa=mask.dense is None and num_sharing > 1,
        )


def fastest_first(query: Tensor) -> AbstractContextManager[None]:
    """Return a context in which GPU kernels are tried in the order of their speed. For 4 x 32 heads x 4096 x 64,
    causal, forward and backward, cuDNN's has 383 TFLOP/s on an H200, and the flash kernel, torch's default, 235."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return sdpa_kernel(
        [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ],
        set_priority=True,
    )


def takes_sequences(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a kernel for packed sequences of any length, which needs no dense mask."""
    if device.type != "cuda" or torch.compiler.is_compiling() or is_watched():
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= 256 and head_dim % 8 == 0


def attend_in_sequences(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attend causally within each sequence that begins at `starts`. Memory grows with tokens, not with their square."""
    batch, _, num_tokens, _ = query.shape
    flat_query, flat_key, flat_value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    varlen_attn, words = _by_sequences()
    seen: Any = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        starts,
        starts,
        num_tokens,
        num_tokens,
        scale=scale,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **words,
    )
    attended: Tensor = seen.unflatten(0, (batch, num_tokens)).transpose(1, 2)
    return attended


@cache
def _by_sequences() -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return torch's kernel and its options. Imported late: it loads the compiler, which takes a second of CPU time.

    Releases without an option for grouped-query attention support it anyway.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class Attention(nn.Module):
    """Projections, rotary positions, attention, and the output projection. The number of heads follows from the outputs
    of the projections, so a rank with some rows of q_proj, k_proj and v_proj, and those columns of o_proj, computes
    some of the heads."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        heads, width = settings.attention, settings.width
        assert isinstance(heads, Heads), "latent attention has a module of its own"
        self.layer, self.head_dim, self.dropout = layer, heads.head_dim, settings.dropout.attention
        self.interleaved = settings.rope is not None and settings.rope.interleaved
        self.q_proj = nn.Linear(width, heads.num_heads * heads.head_dim, bias=heads.qkv_bias)
        self.k_proj = nn.Linear(width, heads.num_kv_heads * heads.head_dim, bias=heads.qkv_bias)
        self.v_proj = nn.Linear(width, heads.num_kv_heads * heads.head_dim, bias=heads.qkv_bias)
        self.o_proj = nn.Linear(heads.num_heads * heads.head_dim, width, bias=heads.output_bias)
        self.q_norm = nn.RMSNorm(heads.head_dim, settings.norm_epsilon) if heads.qk_norm else None
        self.k_norm = nn.RMSNorm(heads.head_dim, settings.norm_epsilon) if heads.qk_norm else None
        self.attend: Attend = attend
        self.kernels = True

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        query = self._heads(self.q_proj(hidden), self.q_norm)
        key = self._heads(self.k_proj(hidden), self.k_norm)
        value = self._heads(self.v_proj(hidden), None)
        if rotation is not None:
            query, key = rotary(query, key, *rotation, interleaved=self.interleaved, kernels=self.kernels)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        dropout = self.dropout if self.training else 0.0
        seen = self.attend(query, key, value, mask, self.head_dim**-0.5, dropout)
        projected: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """Reshape [batch, tokens, heads x dim] to [batch, heads, tokens, dim]."""
        heads = projected.view(*projected.shape[:-1], -1, self.head_dim)
        return (heads if norm is None else norm(heads)).transpose(1, 2)
