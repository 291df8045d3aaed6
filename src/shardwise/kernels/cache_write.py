"""Write a step's keys and values into their blocks: norms of queries and keys, rotary positions and the write, fused.

    query, key, value of a token, concatenated, as one product gives them
        query, key ── norm of each head, where there is one ── rotated by the token's position ──┬── queries (out)
        value ───────────────────────────────────────────────────────────────────────────────────┴── blocks

Rotary pairs are half a head apart or adjacent, and come out half a head apart (`rotary.py`).
"""

from dataclasses import dataclass

from torch import Tensor

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.norm import rms_norm
from shardwise.kernels.rotary import rotate_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Norms and rotation applied to queries and keys before they are written. Tables have a row for each position."""

    cosine: Tensor | None = None
    sine: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    epsilon: float = 1e-6


def write_cache(
    given: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
    turn: Turn,
    *,
    kernels: bool = True,
) -> Tensor:
    """Write keys and values of `given`, [tokens, (heads + 2 KV heads) x dim], into [blocks, KV heads, block size, dim].

    A slot is block number and offset in one number; a negative slot is not written. Returns the queries, [tokens,
    heads, dim].
    """
    floats = turn.q_norm, turn.k_norm
    if kernels and takes_kernel(
        "write_cache", given, keys, values, *floats, lacks=lambda: lacks_turn(given, keys, turn)
    ):
        from shardwise.kernels.cache_write_triton import write

        return write(given, keys, values, positions, slots, turn)
    num_kv_heads, size, dim = keys.shape[1:]
    heads = given.view(given.shape[0], -1, dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if turn.q_norm is not None and turn.k_norm is not None:
        query = rms_norm(query, turn.q_norm, turn.epsilon, kernels=False)
        key = rms_norm(key, turn.k_norm, turn.epsilon, kernels=False)
    if turn.cosine is not None and turn.sine is not None:
        angles = turn.cosine[positions.long()][None], turn.sine[positions.long()][None]
        query, key = (
            rotate_plain(each.transpose(0, 1)[None], *angles, interleaved=turn.interleaved)[0].transpose(0, 1)
            for each in (query, key)
        )
    written = (slots >= 0).nonzero()[:, 0]
    blocks, places = slots[written].long() // size, slots[written].long() % size
    keys[blocks, :, places] = key[written]
    values[blocks, :, places] = value[written]
    return query.contiguous()


def lacks_turn(given: Tensor, keys: Tensor, turn: Turn) -> str | None:
    """Return what the kernels do not support about such heads, if anything."""
    if keys.shape[3] % 2:
        return f"heads of {keys.shape[3]} numbers, which make no pairs"
    if given.stride(1) != 1 or keys.stride(3) != 1:
        return "numbers of a head that lie apart"
    if turn.cosine is not None and turn.cosine.shape[1] * 2 != keys.shape[3]:
        return f"heads of {keys.shape[3]} numbers of which {turn.cosine.shape[1] * 2} are rotated"
    return None
