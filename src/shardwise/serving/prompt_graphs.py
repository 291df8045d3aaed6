"""Steps that contain prompts: everything between two attentions is one CUDA graph (a piece).

    embed ─ [ norm, q k v ] ─ attention ─ [ o, norm, gate, up, down, norm, q k v ] ─ attention ─ ... ─ [ o, ..., down ]
             piece 0                       piece 1                                                      the last piece

Launching a kernel from Python takes the host tens of microseconds, and a layer has nine kernels: without graphs a step
with a short prompt takes as long as one with thousands of tokens. Attention stays outside, because its grid depends on
the sequences in the step. A graph has a fixed number of tokens, the next larger of `SIZES`; the results of padding rows
are not read. Pieces are captured for a size that has come `PATIENCE` times.
"""

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

#: Tokens of a step. Above the largest size the GPU is busy while Python launches the next kernel.
SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
PATIENCE = 2

#: Runs a piece, by its number, on its input and the residual, and returns both updated.
RunPiece = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Pieces(Protocol):
    """Layers that are cut between attentions."""

    num_pieces: int

    def run_piece(self, number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Capture:
    """Captures work and returns a function that replays it. The graphs share memory, as they run one after another."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """All pieces of one size. The input of the first is hidden states, that of the others the output of attention."""

    hidden: Tensor
    seen: Tensor
    #: The output of a piece for attention; and the output of the last piece, with the residual.
    product: Tensor
    last: tuple[Tensor, Tensor]
    replays: list[Callable[[], None]]

    def run(self, num_tokens: int) -> RunPiece:
        def run_piece(number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            (self.seen if number else self.hidden)[:num_tokens].copy_(given)
            self.replays[number]()
            if number + 1 < len(self.replays):
                return self.product[:num_tokens], self.product  # The next graph has the residual's address captured.
            hidden, residual = self.last
            return hidden[:num_tokens], residual[:num_tokens]

        return run_piece


class PromptGraphs:
    """Chooses how to run the pieces of a step. It does not reference the layers, which reference it: without a cycle,
    unused layers are freed at once, not when the garbage collector runs."""

    def __init__(self, *, width: int, seen_width: int, like: Tensor, capture: Any = None) -> None:
        self._widths, self._like = (width, seen_width), like
        self._capture = capture or Capture()
        self._captured: dict[int, _Captured] = {}
        self._asked: Counter[int] = Counter()
        self._is_on = True

    def runner(self, pieces: Pieces, num_tokens: int) -> RunPiece:
        if not self._is_on or num_tokens > SIZES[-1]:
            return pieces.run_piece
        size = SIZES[bisect_left(SIZES, num_tokens)]
        self._asked[size] += 1
        if size not in self._captured and self._asked[size] > PATIENCE:
            self._try_to_capture(pieces, size)
        held = self._captured.get(size)
        return pieces.run_piece if held is None else held.run(num_tokens)

    def _try_to_capture(self, pieces: Pieces, size: int) -> None:
        try:
            self._captured[size] = self._capture_all(pieces, size)
        except Exception as error:  # A layer may do anything that cannot be captured: run without graphs.
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            warnings.warn(f"steps with prompts run without CUDA graphs ({reason})", stacklevel=2)
            self._is_on = False

    def _capture_all(self, pieces: Pieces, size: int) -> _Captured:
        hidden, seen = (self._like.new_zeros(size, width) for width in self._widths)
        # Warm-up: kernels compile, and libraries choose theirs, outside of the graphs.
        product, residual = pieces.run_piece(0, hidden, None)
        held = torch.empty_like(product)
        for number in range(1, pieces.num_pieces):
            product, residual = pieces.run_piece(number, seen, residual)
        last = torch.empty_like(product), torch.empty_like(residual)
        between: list[Tensor | None] = [None]

        def work(number: int) -> None:
            given, before = (seen, between[0]) if number else (hidden, None)
            found = pieces.run_piece(number, given, before)
            between[0] = found[1]
            # One buffer for the products of all pieces: one per layer would be held permanently.
            if number + 1 < pieces.num_pieces:
                held.copy_(found[0])
            else:
                for place, each in zip(last, found, strict=True):
                    place.copy_(each)

        replays = [self._capture(partial(work, number)) for number in range(pieces.num_pieces)]
        return _Captured(hidden=hidden, seen=seen, product=held, last=last, replays=replays)
