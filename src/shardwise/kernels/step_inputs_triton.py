"""The kernel of `step_inputs.py`: one program per row."""

# mypy: ignore-errors
# ruff: noqa: N803

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import launch


@triton.jit(do_not_specialize=["table_stride"])
def _unpack(
    packed, before, tokens, positions, slots, lengths, tables, keys, temperature, top_k, top_p, min_p, drawn,
    table_stride, BLOCK_SIZE: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(packed):
        tl.store(tokens + row, 0)
        tl.store(positions + row, 0)
        tl.store(slots + row, -1)
        tl.store(lengths + row, 0)
        tl.store(keys + row * 2, 0)
        tl.store(keys + row * 2 + 1, 0)
        tl.store(temperature + row, 0.0)
        tl.store(top_k + row, 0)
        tl.store(top_p + row, 1.0)
        tl.store(min_p + row, 0.0)
        tl.store(drawn + row, 0)
    else:
        width = tl.load(packed + 1)
        here = packed + HEADER + row * (FIELDS + width)
        token = tl.load(here)
        if token < 0:
            token = tl.load(before - 1 - token).to(tl.int32)
        position = tl.load(here + 1)
        block = tl.load(here + FIELDS + position // BLOCK_SIZE)
        tl.store(tokens + row, token)
        tl.store(positions + row, position)
        tl.store(slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(lengths + row, position + 1)
        tl.store(drawn + row, position + 1)
        tl.store(keys + row * 2, tl.load(here + 2))
        tl.store(keys + row * 2 + 1, tl.load(here + 3))
        tl.store(temperature + row, tl.load(here + 4).to(tl.float32, bitcast=True))
        tl.store(top_k + row, tl.load(here + 5))
        tl.store(top_p + row, tl.load(here + 6).to(tl.float32, bitcast=True))
        tl.store(min_p + row, tl.load(here + 7).to(tl.float32, bitcast=True))
        for begin in range(0, width, WIDTH):
            place = begin + tl.arange(0, WIDTH)
            found = tl.load(here + FIELDS + place, mask=place < width, other=0)
            tl.store(tables + row.to(tl.int64) * table_stride + place, found, mask=place < width)


def unpack(packed: Tensor, before: Tensor, out: Any, block_size: int, header: int, fields: int) -> None:
    """See `unpack_inputs`."""
    launch(
        _unpack, (out.tokens.shape[0],),
        packed, before, out.tokens, out.positions, out.slots, out.lengths, out.tables, out.keys, out.temperature,
        out.top_k, out.top_p, out.min_p, out.drawn, out.tables.stride(0),
        BLOCK_SIZE=block_size, HEADER=header, FIELDS=fields, WIDTH=256, num_warps=2,
    )  # fmt: skip
