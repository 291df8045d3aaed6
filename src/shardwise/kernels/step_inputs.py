"""The inputs of a decode step, made on the device from one small run of whole numbers.

    packed    rows, width of a table | of each row: token, position, two words of its key, temperature, top-k, top-p,
              min-p, and its table of blocks

Floats travel as their bits. A token below 0 is not known to the host yet: -1 is what row 0 of the step before drew, -2
what row 1 did. A graph has room for more rows than there are: those beyond get a length of 0 and no slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

#: Numbers before the rows, and of a row before its table.
HEADER, FIELDS = 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Memory for as many rows as a graph has; it stays where it is."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    tables: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    #: What the position of the token to be drawn is.
    drawn: Tensor


def make_step_inputs(num_rows: int, width: int, device: torch.device) -> StepInputs:
    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def floats() -> Tensor:
        return torch.zeros(num_rows, dtype=torch.float32, device=device)

    return StepInputs(
        tokens=whole(num_rows), positions=whole(num_rows), slots=whole(num_rows), lengths=whole(num_rows),
        tables=whole(num_rows, width), keys=whole(num_rows, 2), temperature=floats(), top_k=whole(num_rows),
        top_p=floats(), min_p=floats(), drawn=whole(num_rows),
    )  # fmt: skip


def unpack_inputs(packed: Tensor, before: Tensor, out: StepInputs, block_size: int, *, kernels: bool = True) -> None:
    """Fill `out` from what was packed. `before` is what the step before drew."""
    if kernels and takes_kernel("unpack_inputs", out.temperature):
        from shardwise.kernels.step_inputs_triton import unpack

        unpack(packed, before, out, block_size, HEADER, FIELDS)
        return
    num_rows, width = packed[:HEADER].tolist()
    given = packed[HEADER : HEADER + num_rows * (FIELDS + width)].view(num_rows, FIELDS + width)
    for each in (out.tokens, out.positions, out.lengths, out.temperature, out.top_k, out.min_p, out.keys, out.drawn):
        each.zero_()
    out.slots.fill_(-1)
    out.top_p.fill_(1.0)
    tokens, positions = given[:, 0].long(), given[:, 1]
    known = torch.where(tokens < 0, before[(-1 - tokens).clamp(min=0)], tokens)
    out.tokens[:num_rows], out.positions[:num_rows] = known.int(), positions
    out.lengths[:num_rows], out.drawn[:num_rows] = positions + 1, positions + 1
    out.keys[:num_rows], out.top_k[:num_rows] = given[:, 2:4], given[:, 5]
    for place, each in ((4, out.temperature), (6, out.top_p), (7, out.min_p)):
        each[:num_rows] = given[:, place].contiguous().view(torch.float32)
    out.tables[:num_rows, :width] = given[:, FIELDS:]
    blocks = given[:, FIELDS:].gather(1, (positions // block_size).long()[:, None])[:, 0]
    out.slots[:num_rows] = blocks * block_size + positions % block_size
