"""The kernels of `sampling.py`.

cut       one program per row: the lowest logit that may be sampled, by a search over its bits, two per read of the row
          from the highest on: nothing is sorted, and no other memory is used
draw      one program per piece of a row: its largest logit with noise, and the sum of its exponentials
choose    one program per row: the largest of its pieces
"""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import launch

#: Words per iteration of a program.
PIECE, CUT_PIECE = 4096, 8192
#: Arguments at varying addresses in the host's packed inputs, or after a varying number of rows: kernels are not
#: specialised on whether one of them happens to be aligned to 16 bytes.
_ANY_PLACE = [
    "temperatures", "top_ks", "top_ps", "min_ps", "lowest", "keys", "positions", "best", "words", "highests", "totals",
]  # fmt: skip


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key_one, key_two, position, word):
    """Return the noise of these words, in unsigned 32 bits, which wrap around as the definition's do."""
    row = _mix(key_one ^ _mix(position + key_two))
    bits = _mix(_mix(word.to(tl.uint32) * 0x9E3779B9 + row) ^ key_two)
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    small = uniform * (1.0 + 0.5 * uniform)
    return -tl.log(tl.where(uniform < 0.00048828125, small, -tl.log(1.0 - uniform)))


@triton.jit
def _ranks(x):
    """Return integers in the order of these floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _float_of(rank):
    return tl.where(rank >> 31 == 1, rank & 0x7FFFFFFF, ~rank).to(tl.float32, bitcast=True)


@triton.jit
def _find_lowest(logits, num_words, temperature, highest, least, goal, BY_SHARE: tl.constexpr, PIECE: tl.constexpr):
    """Return the highest rank such that, of words from `least` on, those from it on number or weigh at least `goal`."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        one = found | bit
        two = found | (bit << 1)
        three = one | two
        bit = bit >> 2
        sum_one = tl.zeros((PIECE,), tl.float32)
        sum_two = tl.zeros((PIECE,), tl.float32)
        sum_three = tl.zeros((PIECE,), tl.float32)
        for begin in range(0, num_words, PIECE):
            word = begin + tl.arange(0, PIECE)
            x = tl.load(logits + word, mask=word < num_words, other=-float("inf")).to(tl.float32)
            scaled = tl.div_rn(x, temperature)
            rank = _ranks(scaled)
            weight = tl.where(word < num_words, 1.0, 0.0)
            if BY_SHARE:
                weight = tl.where(rank >= least, tl.exp(scaled - highest), 0.0)
            sum_one += tl.where(rank >= one, weight, 0.0)
            sum_two += tl.where(rank >= two, weight, 0.0)
            sum_three += tl.where(rank >= three, weight, 0.0)
        if tl.sum(sum_three, 0) >= goal:
            found = three
        elif tl.sum(sum_two, 0) >= goal:
            found = two
        elif tl.sum(sum_one, 0) >= goal:
            found = one
    return found


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _cut(logits, temperatures, top_ks, top_ps, min_ps, lowest, stride, num_words, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    least = tl.full((), 0, tl.uint32)
    is_cut = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if (temperature > 0.0) & is_cut:
        logits += row * stride
        best = tl.full((PIECE,), -float("inf"), tl.float32)
        for begin in range(0, num_words, PIECE):
            word = begin + tl.arange(0, PIECE)
            best = tl.maximum(best, tl.load(logits + word, mask=word < num_words, other=-float("inf")).to(tl.float32))
        highest = tl.div_rn(tl.max(best, 0), temperature)
        if (top_k > 0) & (top_k < num_words):
            goal = top_k.to(tl.float32)
            least = _find_lowest(logits, num_words, temperature, highest, least, goal, False, PIECE)
        if top_p < 1.0:
            total = tl.zeros((PIECE,), tl.float32)
            for begin in range(0, num_words, PIECE):
                word = begin + tl.arange(0, PIECE)
                x = tl.load(logits + word, mask=word < num_words, other=-float("inf")).to(tl.float32)
                scaled = tl.div_rn(x, temperature)
                total += tl.where(_ranks(scaled) >= least, tl.exp(scaled - highest), 0.0)
            goal = top_p * tl.sum(total, 0)
            least = _find_lowest(logits, num_words, temperature, highest, least, goal, True, PIECE)
        if min_p > 0.0:
            least = tl.maximum(least, _ranks(highest + tl.log(min_p)))
    tl.store(lowest + row, tl.where(least == 0, -float("inf"), _float_of(least)))


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _draw(
    logits, temperatures, lowest, keys, positions, best, words, highests, totals, stride, num_words, num_pieces,
    HAS_CUTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    word = piece * PIECE + tl.arange(0, PIECE)
    is_word = word < num_words
    x = tl.load(logits + row * stride + word, mask=is_word, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    highest = tl.max(x, 0)
    there = row * num_pieces + piece
    tl.store(highests + there, highest)
    tl.store(totals + there, tl.sum(tl.exp(x - tl.where(highest == -float("inf"), 0.0, highest)), 0))
    if temperature > 0.0:
        x = tl.div_rn(x, temperature)
        if HAS_CUTS:
            x = tl.where(x >= tl.load(lowest + row), x, -float("inf"))
        key_one = tl.load(keys + row * 2).to(tl.uint32)
        key_two = tl.load(keys + row * 2 + 1).to(tl.uint32)
        x += _gumbel(key_one, key_two, tl.load(positions + row).to(tl.uint32), word)
        x = tl.where(is_word, x, -float("inf"))
    value = tl.max(x, 0)
    tl.store(best + there, value)
    # On a tie, the first word.
    tl.store(words + there, tl.min(tl.where(x == value, word, 2147483647), 0))


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _choose(
    logits, best, words, highests, totals, tokens, logprobs, stride, num_pieces, PIECES: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    is_piece = piece < num_pieces
    there = row * num_pieces + piece
    value = tl.load(best + there, mask=is_piece, other=-float("inf"))
    word = tl.load(words + there, mask=is_piece, other=2147483647)
    token = tl.min(tl.where(value == tl.max(value, 0), word, 2147483647), 0)
    high = tl.load(highests + there, mask=is_piece, other=-float("inf"))
    total = tl.load(totals + there, mask=is_piece, other=0.0)
    highest = tl.max(high, 0)
    whole = tl.sum(tl.where(is_piece, total * tl.exp(high - highest), 0.0), 0)
    own = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, own - highest - tl.log(whole))


def sample_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor, positions: Tensor,
    has_cuts: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `sample`."""
    num_rows, num_words = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, top_k, top_p, min_p, keys, positions = (
        each.contiguous() for each in (temperature, top_k, top_p, min_p, keys, positions)
    )
    num_pieces = triton.cdiv(num_words, PIECE)
    floats = torch.empty((3, num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    words = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    lowest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return tokens, logprobs
    if has_cuts:
        piece = min(CUT_PIECE, triton.next_power_of_2(num_words))
        launch(
            _cut, (num_rows,),
            logits, temperature, top_k, top_p, min_p, lowest, logits.stride(0), num_words, PIECE=piece, num_warps=16,
        )  # fmt: skip
    launch(
        _draw, (num_rows, num_pieces),
        logits, temperature, lowest, keys, positions, floats[0], words, floats[1], floats[2], logits.stride(0),
        num_words, num_pieces, HAS_CUTS=has_cuts, PIECE=min(PIECE, triton.next_power_of_2(num_words)), num_warps=8,
    )  # fmt: skip
    launch(
        _choose, (num_rows,),
        logits, floats[0], words, floats[1], floats[2], tokens, logprobs, logits.stride(0), num_pieces,
        PIECES=triton.next_power_of_2(num_pieces), num_warps=1,
    )  # fmt: skip
    return tokens, logprobs
