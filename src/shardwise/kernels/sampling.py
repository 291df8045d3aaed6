"""The next token of many rows of logits, each drawn with its own parameters and from its own seed.

A row's draw is that of the largest `logit / temperature + noise`, the noise of each word being Gumbel's (Gumbel 1954;
Maddison et al. 2014, section 2): words come out as often as the softmax says. Noise is a hash of the row's key, the
position in its sequence and the word, and of nothing else, so a row draws the same whatever is drawn beside it.

Words are left out by a threshold: all but the `top_k` likeliest; of these all behind those whose share is `top_p`;
and those that are less than `min_p` times as likely as the likeliest. Words that are equally likely go or stay
together.
"""

from hashlib import blake2b

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

_BITS = 0xFFFFFFFF


def make_key(seed: int) -> tuple[int, int]:
    """Two words of 32 bits from a seed: seeds that are neighbours have nothing in common."""
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
    """Tokens, [rows], and the log-probability of each before temperature and cuts; logits may be of any float type.

    `has_cuts=False` says that no row has a top-k, top-p or min-p, where the caller knows.
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

    A temperature of 0 takes the likeliest word; of several, the first.
    """
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    kept = scaled >= threshold(scaled, top_k, top_p, min_p)[:, None]
    drawn = torch.where(kept, scaled + gumbel(keys, positions, logits.shape[1]), -torch.inf)
    return torch.where(is_greedy[:, None], logits, drawn).argmax(-1)


def threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that may be drawn, of each row. `top_k=0`, `top_p=1` and `min_p=0` leave nothing out."""
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
        # A word stays if those before it have less than the share, so the likeliest always does.
        stays = (shares.cumsum(-1) - shares < top_p[rows, None]) & (ordered > -torch.inf)
        least = ordered.gather(1, stays.sum(-1, keepdim=True).clamp(min=1) - 1)[:, 0]
        lowest[rows] = torch.maximum(lowest[rows], least)
    return lowest


def gumbel(keys: Tensor, positions: Tensor, num_words: int) -> Tensor:
    """[rows, words]."""
    words = torch.arange(num_words, device=keys.device)
    row = mix(keys[:, 0] ^ mix((positions + keys[:, 1]) & _BITS))
    bits = mix(mix((words * 0x9E3779B9 + row[:, None]) & _BITS) ^ keys[:, 1, None])
    # An exponential number, -log(1 - uniform). Small ones are the likely winners and keep their digits; none is 0,
    # which would win against any logit.
    uniform = bits.float() * 2.0**-32 + 2.0**-33
    small = uniform * (1.0 + 0.5 * uniform)
    return -torch.where(uniform < 2.0**-11, small, -(1.0 - uniform).log()).log()


def mix(x: Tensor) -> Tensor:
    """A hash of 32 bits, held in int64 (Wellons' lowbias32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _BITS
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _BITS
    return x ^ (x >> 16)
