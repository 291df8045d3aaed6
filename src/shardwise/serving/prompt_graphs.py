"""Steps with prompts in them: what lies between two attentions is a CUDA graph.

    embed ─ [ norm, q k v ] ─ attention ─ [ o, norm, gate, up, down, norm, q k v ] ─ attention ─ ... ─ [ o, ..., down ]
             piece 0                       piece 1                                                      the last piece

A kernel that Python begins takes tens of microseconds of the host, and a layer has nine of them: without graphs a step
with a short prompt takes as long as one with thousands of tokens. Attention stays outside: how it is cut into programs
hangs on whose tokens the step has. A graph has a fixed number of tokens, the next larger of `SIZES`; rows that are left
over compute something that nobody reads. Pieces are captured for a size that has come `PATIENCE` times.
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

#: Tokens of a step. Beyond the largest the GPU has enough to do while Python begins the next kernel.
SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
PATIENCE = 2

#: A piece by its number, of what it is given and of the residual: what comes out of both.
RunPiece = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Pieces(Protocol):
    """Layers, cut between attentions."""

    num_pieces: int

    def run_piece(self, number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Capture:
    """Turns work into something that does it again; the graphs share their memory, as they run one after the other."""

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
    """All pieces of one size. The first is given hidden states, the others what attention has seen."""

    hidden: Tensor
    seen: Tensor
    #: What a piece gives to attention; and what the last one gives, with the residual.
    product: Tensor
    last: tuple[Tensor, Tensor]
    replays: list[Callable[[], None]]

    def run(self, num_tokens: int) -> RunPiece:
        def run_piece(number: int, given: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            (self.seen if number else self.hidden)[:num_tokens].copy_(given)
            self.replays[number]()
            if number + 1 < len(self.replays):
                return self.product[:num_tokens], self.product  # The next graph knows where the residual lies.
            hidden, residual = self.last
            return hidden[:num_tokens], residual[:num_tokens]

        return run_piece


class PromptGraphs:
    """Who runs the pieces of a step with so many tokens. It does not hold the layers, which hold it: what nobody uses
    any more is to go at once, not when Python looks for circles."""

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
        except Exception as error:  # Whatever a layer does that no graph can hold: steps go on without.
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            warnings.warn(f"steps with prompts run without CUDA graphs ({reason})", stacklevel=2)
            self._is_on = False

    def _capture_all(self, pieces: Pieces, size: int) -> _Captured:
        hidden, seen = (self._like.new_zeros(size, width) for width in self._widths)
        # Once as it is: kernels are compiled, and libraries choose theirs, outside of the graphs.
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
            # One place for all products: that of each layer would be held for good.
            if number + 1 < pieces.num_pieces:
                held.copy_(found[0])
            else:
                for place, each in zip(last, found, strict=True):
                    place.copy_(each)

        replays = [self._capture(partial(work, number)) for number in range(pieces.num_pieces)]
        return _Captured(hidden=hidden, seen=seen, product=held, last=last, replays=replays)
