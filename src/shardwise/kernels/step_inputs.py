"""The inputs of a decode step, unpacked on the device from one small array of integers.

    packed    number of rows, width of a table | for each row: token, position, two words of its key, temperature,
              top-k, top-p, min-p, and its block table

Floats are sent as their bits. A negative token is not known to the host yet: -1 is the token that row 0 of the previous
step sampled, -2 that of row 1. A graph may have more rows than the step: the padding rows get length 0 and no slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

#: Numbers before the rows, and of a row before its table.
HEADER, FIELDS = 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Buffers for as many rows as a graph has, at fixed addresses."""

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
    #: The position of the token to be sampled.
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
    """Fill `out` from the packed inputs. `before` are the tokens that the previous step sampled."""
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
