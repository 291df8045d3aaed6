"""Device functions for attention over blocks: addresses of rows, the online softmax, and parts of a context, which the
last part combines.

The width of tables changes from step to step, and so do the addresses of tables and lengths in the host's packed
inputs. Kernels are therefore not specialised on widths and addresses that happen to be multiples of 16.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
#: Names of arguments that are multiples of 16 in one step and not in the next.
ANY_SIZE, ANY_PLACE = ["table_stride", "fewest", "num_parts"], ["tables", "lengths", "starts", "tiles", "counters"]
#: The wanted number of programs per multiprocessor in a decode; the fewest tokens of a part, and the same where there
#: are enough programs anyway; and the most parts.
PROGRAMS, FEWEST_TOKENS, MANY_TOKENS, MOST_PARTS = 6, 64, 512, 64


@triton.jit
def rows_of_tokens(
    tables, table_row, token, is_token, block_stride, token_stride, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the offsets of these tokens' rows, relative to the head's beginning in block 0."""
    block = tl.load(tables + table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    return block * block_stride + (token % BLOCK_SIZE) * token_stride


@triton.jit
def softmax_step(logits, highest, total):
    """One step of the online softmax: return the weights of one more tile of keys, the factor for the results so far,
    and the new maximum logit and sum of weights."""
    new = tl.maximum(highest, tl.max(logits, 1))
    # A tile before the window leaves the maximum at -inf: avoid -inf - -inf.
    base = tl.where(new == -float("inf"), 0.0, new)
    shares = tl.exp2(logits - base[:, None])
    kept = tl.exp2(highest - base)
    return shares, kept, new, total * kept + tl.sum(shares, 1)


@triton.jit
def in_parts(length, window, fewest, num_parts, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the first token attended to, where the first part begins, and how many tokens each part has."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // KEYS * KEYS
    each = tl.maximum(tl.cdiv(length - begin, num_parts), fewest)
    return first, begin, tl.cdiv(each, KEYS) * KEYS


@triton.jit
def leave(
    highest, total, seen, out, sums, logs, counter, first_row, row_step, num_rows, part, most_parts, num_parts,
    dim, is_dim, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Store a part's result: to `out` if it is the only part; otherwise beside the others', and the last part combines.

    Rows of `out` are `num_rows` from `first_row` on, `row_step` apart; GROUP is the next power of two.
    """
    local = tl.arange(0, ROWS)
    is_row = local < num_rows
    is_out = is_row[:, None] & is_dim[None, :]
    row = first_row + local.to(tl.int64) * row_step
    # A query whose window begins after a part attends to nothing in it.
    seen = seen / tl.where(total == 0.0, 1.0, total)[:, None]
    if num_parts == 1:
        tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], seen.to(out.dtype.element_ty), mask=is_out)
    else:
        row = row * most_parts + part
        tl.store(sums + row[:, None] * HEAD_DIM + dim[None, :], seen, mask=is_out)
        log = tl.where(total == 0.0, -float("inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(logs + row, log, mask=is_row)
        tl.debug_barrier()  # All of it must be stored before this part is counted.
        if tl.atomic_add(counter, 1) == num_parts - 1:
            _put_together(
                sums, logs, out, first_row, row_step, num_rows, num_parts, most_parts, dim, is_dim, GROUP, HEAD_DIM, DIM
            )  # fmt: skip
            tl.store(counter, 0)  # For the next launch, which runs after this one.


@triton.jit
def _put_together(
    sums, logs, out, first_row, row_step, num_rows, num_parts, most_parts, dim, is_dim,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Combine the parts' results. Other programs wrote them just now, so the loads bypass the L1 cache."""
    # As many parts at a time as fit in registers.
    PARTS: tl.constexpr = 8 if GROUP <= 4 else (2 if GROUP <= 16 else 1)
    local = tl.arange(0, GROUP)
    row = first_row + local.to(tl.int64) * row_step
    is_row = local < num_rows
    highest = tl.full((GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    made = tl.zeros((GROUP, DIM), tl.float32)
    for begin in range(0, num_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        is_part = is_row[:, None] & (part < num_parts)[None, :]
        here = row[:, None] * most_parts + part[None, :]
        log = tl.load(logs + here, mask=is_part, other=-float("inf"), cache_modifier=".cg")
        seen = tl.load(
            sums + here[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=is_part[:, :, None] & is_dim[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        share, kept, highest, total = softmax_step(log, highest, total)
        made = made * kept[:, None] + tl.sum(seen * share[:, :, None], 1)
    made = made / tl.where(total == 0.0, 1.0, total)[:, None]
    there = out + row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(there, made.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


def count_parts(
    num_sequences: int, num_kv_heads: int, longest: int, processors: int, each: int | None = None
) -> tuple[int, int]:
    """Return into how many parts contexts are split at most, and the fewest tokens of a part. Does not depend on
    lengths, so that a captured graph holds for all of them. A multiprocessor should have `each` programs."""
    programs = max(num_sequences * num_kv_heads, 1)
    wanted = triton.next_power_of_2(triton.cdiv((each or PROGRAMS) * processors, programs))
    # One long context among many short ones is still split.
    parts = min(max(wanted, 4), MOST_PARTS, triton.next_power_of_2(triton.cdiv(longest, FEWEST_TOKENS)))
    return max(parts, 1), FEWEST_TOKENS if wanted > 4 else MANY_TOKENS
