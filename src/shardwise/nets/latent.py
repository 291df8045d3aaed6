"""Multi-head latent attention (DeepSeek-V2, section 2.1.2, equations 9 to 19).

hidden ── q_a_proj ── norm ── q_b_proj ──┬─ without position ───────────────────────┐
                                         └─ rotated ────────────────────────────────┤ queries
hidden ── kv_a_proj ─┬─ norm ── (cache) ── kv_b_proj ─┬─ keys without position ─────┤ keys
                     │                                └─ values                     │
                     └─ rotated ── (cache) ── the same for all heads ───────────────┘
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.nets.attention import Attend, attend
from shardwise.nets.cache import Cache
from shardwise.nets.mask import AttentionMask
from shardwise.nets.rotary import Rotation, latent_magnitude_of, rotate
from shardwise.nets.settings import Latent, Settings

#: The epsilon of the latent vectors' norms, whatever that of the others, as in DeepSeek's own code.
_EPSILON = 1e-6
#: Attends to the latent vectors and rotated keys in a cache. Maps queries without position and rotated queries,
#: [batch, heads, tokens, dim], and the mask to the outputs of heads, [batch, heads, tokens, value dim].
AttendShort = Callable[[Tensor, Tensor, AttentionMask], Tensor]


class LatentAttention(nn.Module):
    """Latent attention. The number of heads follows from the outputs of q_proj (or q_b_proj) and kv_b_proj, so a rank
    may have some of them."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        sizes, width, rope = settings.attention, settings.width, settings.rope
        assert isinstance(sizes, Latent), "attention by heads has a module of its own"
        assert rope is not None, "latent attention rotates a part of each head"
        self.layer, self.sizes, self.interleaved = layer, sizes, rope.interleaved
        self.dropout = settings.dropout.attention
        query_dim = sizes.nope_dim + sizes.rope_dim
        self.scale = query_dim**-0.5 * latent_magnitude_of(rope)
        if sizes.q_rank is None:
            self.q_proj = nn.Linear(width, sizes.num_heads * query_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, sizes.q_rank, bias=sizes.bias)
            self.q_a_norm = nn.RMSNorm(sizes.q_rank, _EPSILON)
            self.q_b_proj = nn.Linear(sizes.q_rank, sizes.num_heads * query_dim, bias=False)
        self.kv_a_proj = nn.Linear(width, sizes.kv_rank + sizes.rope_dim, bias=sizes.bias)
        self.kv_a_norm = nn.RMSNorm(sizes.kv_rank, _EPSILON)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, sizes.num_heads * (sizes.nope_dim + sizes.value_dim), bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.value_dim, width, bias=sizes.bias)
        self.attend: Attend = attend
        #: Set by a cache that attends itself: then the cached latent vectors are not expanded to keys and values.
        self.attend_short: AttendShort | None = None

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        assert rotation is not None, "latent attention rotates a part of each head"
        sizes = self.sizes
        query_plain, query_turned = _heads(self._query(hidden), sizes.nope_dim, sizes.rope_dim)
        short, key_turned = self.kv_a_proj(hidden).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        short = self.kv_a_norm(short)
        query_turned = rotate(query_turned, rotation, interleaved=self.interleaved)
        key_turned = rotate(key_turned[:, None], rotation, interleaved=self.interleaved)
        if cache is not None:
            short, key_turned = cache.extend(self.layer, short, key_turned)
        if self.attend_short is not None and cache is not None:
            seen = self.attend_short(query_plain, query_turned, mask)
        else:
            seen = self._attend(query_plain, query_turned, short, key_turned, mask)
        projected: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return projected

    def _attend(
        self, query_plain: Tensor, query_turned: Tensor, short: Tensor, key_turned: Tensor, mask: AttentionMask
    ) -> Tensor:
        sizes = self.sizes
        key_plain, value = _heads(self.kv_b_proj(short), sizes.nope_dim, sizes.value_dim)
        query = torch.cat((query_plain, query_turned), dim=-1)
        key = torch.cat((key_plain, key_turned.expand(-1, key_plain.shape[1], -1, -1)), dim=-1)
        return self.attend(query, key, value, mask, self.scale, self.dropout if self.training else 0.0)

    def _query(self, hidden: Tensor) -> Tensor:
        projected: Tensor
        if self.sizes.q_rank is None:
            projected = self.q_proj(hidden)
        else:
            projected = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden)))
        return projected


def _heads(projected: Tensor, first_dim: int, second_dim: int) -> tuple[Tensor, Tensor]:
    """Split [batch, tokens, heads x (first + second)] into two parts, each [batch, heads, tokens, its dim]."""
    heads = projected.view(*projected.shape[:-1], -1, first_dim + second_dim).transpose(1, 2)
    return heads[..., :first_dim], heads[..., first_dim:]
