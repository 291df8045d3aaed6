"""Pack what a step needs from the host into one array of integers: one small copy to the device.

Block tables are kept as rows of one array from step to step, because most steps give a sequence no new block.
"""

from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt

from shardwise.kernels.sampling import make_key
from shardwise.kernels.step_inputs import FIELDS, HEADER
from shardwise.serving.sequence import Piece, Sequence

Whole = npt.NDArray[np.int32]


class Tables:
    """The block tables of sequences, one row each; rows of sequences that have ended are reused."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.rows: Whole = np.zeros((num_rows, width), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        #: For each sequence: its row, the number of its admission, and how many blocks the row has.
        self._held: dict[Sequence, tuple[int, int, int]] = {}

    def row_of(self, sequence: Sequence) -> int:
        """Return the row of a sequence, updated."""
        row, num_begun, count = self._held.get(sequence) or (self._take(), -1, 0)
        blocks = sequence.blocks
        if num_begun != sequence.num_begun:
            count = 0
        if count != len(blocks):
            self.rows[row, count : len(blocks)] = blocks[count:]
            self._held[sequence] = row, sequence.num_begun, len(blocks)
        return row

    def _take(self) -> int:
        if not self._free:
            self._free = [held[0] for sequence, held in self._held.items() if sequence.is_gone or not sequence.blocks]
            self._held = {each: held for each, held in self._held.items() if not each.is_gone and each.blocks}
            assert self._free, "there is a row for everyone who runs"
        return self._free.pop()


def packed_sampling_of(sequence: Sequence) -> tuple[int, ...]:
    """Return a sequence's sampling parameters in the order of `step_inputs.py`; computed once."""
    if not sequence.packed_sampling:
        sampling = sequence.request.sampling
        one, two = np.array(make_key(sequence.seed), np.uint32).view(np.int32).tolist()
        floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32).view(np.int32).tolist()
        sequence.packed_sampling = one, two, floats[0], sampling.top_k, floats[1], floats[2]
    return sequence.packed_sampling


def has_cuts(sequences: Several[Sequence]) -> bool:
    """Whether any of them restricts the vocabulary (top-k, top-p or min-p)."""
    for sequence in sequences:
        sampling = sequence.request.sampling
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
            return True
    return False


def token_at(sequence: Sequence, place: int) -> int:
    """Return a token, or -1 - row if the step in flight samples it in that row."""
    token = sequence.tokens[place]
    return token if token >= 0 else -1 - sequence.row


def pack_singles(pieces: Several[Piece], tables: Tables, block_size: int) -> Whole:
    """Pack a decode step: one token of each sequence. See `kernels/step_inputs.py`."""
    count = len(pieces)
    width = max(piece.start for piece in pieces) // block_size + 1
    packed: Whole = np.empty(HEADER + count * (FIELDS + width), np.int32)
    packed[0], packed[1] = count, width
    rows = packed[HEADER:].reshape(count, FIELDS + width)
    rows[:, :FIELDS] = [
        (token_at(piece.sequence, piece.start), piece.start, *packed_sampling_of(piece.sequence)) for piece in pieces
    ]
    rows[:, FIELDS:] = tables.rows[[tables.row_of(piece.sequence) for piece in pieces], :width]
    return packed
