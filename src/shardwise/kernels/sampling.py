"""Sample the next token of many rows of logits, each with its own parameters and seed.

A row's sample is the argmax of `logit / temperature + noise`, where each word's noise is from the Gumbel distribution
(Gumbel 1954; Maddison et al. 2014, section 2): words are then distributed as the softmax says. Noise is a hash of the
row's key, the position in its sequence and the word, so a row's sample does not depend on the rest of the batch.

Words are excluded by a threshold: all but the `top_k` most likely; of these, all after those whose shares sum to
`top_p`; and those less than `min_p` times as likely as the most likely one. Words that are equally likely are kept or
excluded together.
"""

from hashlib import blake2b

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

_BITS = 0xFFFFFFFF


def make_key(seed: int) -> tuple[int, int]:
    """Derive two 32-bit words from a seed, so that consecutive seeds are unrelated."""
    digest = blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    has_cuts: bool = True,
    kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return tokens, [rows], and each one's log-probability before temperature and cuts; logits may be any float dtype.

    `has_cuts=False` promises that no row has a top-k, top-p or min-p.
    """
    if kernels and takes_kernel("sample", logits):
        from shardwise.kernels.sampling_triton import sample_rows

        return sample_rows(logits, temperature, top_k, top_p, min_p, keys, positions, has_cuts)
    numbers = logits.float()
    tokens = sample_plain(numbers, temperature, top_k, top_p, min_p, keys.long() & _BITS, positions)
    return tokens, numbers.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def sample_plain(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Tensor:
    """The definition. Logits are [rows, words] in float32, `keys` [rows, 2], all else [rows]; tokens are [rows].

    A temperature of 0 takes the most likely word; of several, the first.
    """
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    kept = scaled >= threshold(scaled, top_k, top_p, min_p)[:, None]
    drawn = torch.where(kept, scaled + gumbel(keys, positions, logits.shape[1]), -torch.inf)
    return torch.where(is_greedy[:, None], logits, drawn).argmax(-1)


def threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return each row's lowest logit that may be sampled. `top_k=0`, `top_p=1` and `min_p=0` exclude nothing."""
    lowest = scaled.new_full((scaled.shape[0],), -torch.inf)
    if bool((min_p > 0).any()):
        lowest = scaled.max(-1).values + min_p.log()
    rows = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(rows):
        ordered = scaled[rows].sort(-1, descending=True).values
        num_kept = torch.where(top_k[rows] > 0, top_k[rows], ordered.shape[1]).clamp(max=ordered.shape[1])
        kth = ordered.gather(1, num_kept[:, None] - 1)
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        shares = ordered.softmax(-1)
        # A word is kept if the more likely ones have less than the share, so the most likely always is.
        stays = (shares.cumsum(-1) - shares < top_p[rows, None]) & (ordered > -torch.inf)
        least = ordered.gather(1, stays.sum(-1, keepdim=True).clamp(min=1) - 1)[:, 0]
        lowest[rows] = torch.maximum(lowest[rows], least)
    return lowest


def gumbel(keys: Tensor, positions: Tensor, num_words: int) -> Tensor:
    """Return the noise, [rows, words]."""
    words = torch.arange(num_words, device=keys.device)
    row = mix(keys[:, 0] ^ mix((positions + keys[:, 1]) & _BITS))
    bits = mix(mix((words * 0x9E3779B9 + row[:, None]) & _BITS) ^ keys[:, 1, None])
    # An exponential variate, -log(1 - uniform). Small ones are the likely winners and keep their precision; none is 0,
    # which would beat any logit.
    uniform = bits.float() * 2.0**-32 + 2.0**-33
    small = uniform * (1.0 + 0.5 * uniform)
    return -torch.where(uniform < 2.0**-11, small, -(1.0 - uniform).log()).log()


def mix(x: Tensor) -> Tensor:
    """Return a hash of 32 bits, held in int64 (Wellons' lowbias32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _BITS
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _BITS
    return x ^ (x >> 16)
