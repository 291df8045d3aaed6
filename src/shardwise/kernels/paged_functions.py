"""What programs of attention over blocks share: where rows lie, the online softmax, and parts of a context."""

# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
#: Programs of a decode that a processor should have, the fewest tokens of a part, also where there are as many programs
#: anyway, and the most parts.
PROGRAMS, FEWEST_TOKENS, MANY_TOKENS, MOST_PARTS = 6, 64, 512, 64


@triton.jit
def rows_of_tokens(
    tables, table_row, token, is_token, block_stride, token_stride, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the rows of these tokens begin, from the head's beginning in block 0 on."""
    block = tl.load(tables + table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    return block * block_stride + (token % BLOCK_SIZE) * token_stride


@triton.jit
def softmax_step(logits, highest, total):
    """The online softmax of one more tile of keys: their shares of what is seen so far, what is left of what was seen
    before, and the new highest logit and sum of shares."""
    new = tl.maximum(highest, tl.max(logits, 1))
    # A tile before the window has nothing yet: no number minus none.
    base = tl.where(new == -float("inf"), 0.0, new)
    shares = tl.exp2(logits - base[:, None])
    kept = tl.exp2(highest - base)
    return shares, kept, new, total * kept + tl.sum(shares, 1)


@triton.jit
def in_parts(length, window, fewest, num_parts, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first token that is seen, where the first part begins, and how many tokens each has."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // KEYS * KEYS
    each = tl.maximum(tl.cdiv(length - begin, num_parts), fewest)
    return first, begin, tl.cdiv(each, KEYS) * KEYS


def count_parts(
    num_sequences: int, num_kv_heads: int, longest: int, processors: int, each: int | None = None
) -> tuple[int, int]:
    """In how many parts contexts are read at most, and the fewest tokens of a part. Lengths are not looked at: what a
    graph was captured with holds for all of them. A processor should have `each` programs."""
    programs = max(num_sequences * num_kv_heads, 1)
    wanted = triton.next_power_of_2(triton.cdiv((each or PROGRAMS) * processors, programs))
    # One long context among many short ones is still read by several.
    parts = min(max(wanted, 4), MOST_PARTS, triton.next_power_of_2(triton.cdiv(longest, FEWEST_TOKENS)))
    return max(parts, 1), FEWEST_TOKENS if wanted > 4 else MANY_TOKENS
