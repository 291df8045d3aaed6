"""Decode steps as CUDA graphs: one call launches all kernels of a step.

A graph has a fixed number of rows. Smaller steps leave rows empty, which costs almost nothing, because a decode step is
bound by reading weights, whatever the number of its rows. A graph is captured when a step of its size first comes, and
a capture delays all requests for a few hundred milliseconds. So if a captured graph exists that is less than
`MOST_EMPTY` times as large, it is used until it has served `PATIENCE` such steps: while 256 requests end one by one,
most sizes in between are needed too briefly to be worth a capture.
"""

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.sampling import sample
from shardwise.kernels.step_inputs import StepInputs, make_step_inputs, unpack_inputs

#: Numbers of rows that are captured.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
#: A graph also serves steps of a smaller size, if it is less than `MOST_EMPTY` times as large, for `PATIENCE` steps.
#: Not for sizes below `FEWEST` rows, which use other matmul kernels.
MOST_EMPTY, PATIENCE, FEWEST = 4, 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph | None
    logits: Tensor


class DecodeGraphs:
    """`forward` returns the logits of one token per row. `drawn` receives the tokens for the next step to read."""

    def __init__(
        self, forward: Callable[[StepInputs], Tensor], drawn: Tensor, *, num_rows: int, width: int, block_size: int,
        uses_graphs: bool = True, kernels: bool = True,
    ) -> None:  # fmt: skip
        self._forward, self._drawn, self._block_size = forward, drawn, block_size
        self._kernels = kernels
        self.sizes = [size for size in SIZES if size < num_rows] + [num_rows]
        self._whole = make_step_inputs(num_rows, width, drawn.device)
        self._packed = torch.zeros(2 + num_rows * (8 + width), dtype=torch.int32, device=drawn.device)
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool: Any = None
        #: How many steps of a size were served by a larger graph.
        self._served: Counter[tuple[int, bool]] = Counter()
        self._is_on = drawn.is_cuda and uses_graphs

    def run(self, packed: Tensor, num_rows: int, *, has_cuts: bool) -> Tensor:
        """Return the logits of the rows, valid until the next step; the sampled tokens are in `drawn`."""
        size = self._choose(num_rows, has_cuts)
        self._packed[: len(packed)].copy_(packed, non_blocking=True)
        held = self._captured.get((size, has_cuts))
        if held is None and self._is_on:
            held = self._capture(size, has_cuts)
        if held is None or held.graph is None:
            return self._step(size, has_cuts)[:num_rows]
        held.graph.replay()
        return held.logits[:num_rows]

    def _choose(self, num_rows: int, has_cuts: bool) -> int:
        """Return the size of the graph to use, which is captured already or is to be captured."""
        first = bisect_left(self.sizes, num_rows)
        size = self.sizes[first]
        if (size, has_cuts) in self._captured:
            return size
        larger = next((each for each in self.sizes[first:] if (each, has_cuts) in self._captured), None)
        is_near = larger is not None and size >= FEWEST and larger < MOST_EMPTY * size
        if larger is None or not is_near or self._served[size, has_cuts] >= PATIENCE:
            return size
        self._served[size, has_cuts] += 1
        return larger

    def _step(self, size: int, has_cuts: bool) -> Tensor:
        rows = _first_rows(self._whole, size)
        unpack_inputs(self._packed, self._drawn, rows, self._block_size, kernels=self._kernels)
        logits = self._forward(rows)
        tokens, _ = sample(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.keys, rows.drawn,
            has_cuts=has_cuts, kernels=self._kernels,
        )  # fmt: skip
        self._drawn[:size].copy_(tokens)
        return logits

    def _capture(self, size: int, has_cuts: bool) -> _Captured | None:
        """Capture a step with no rows, which changes nothing that is read later; then restore the pending inputs."""
        held: _Captured | None
        given, before = self._packed[:2].clone(), self._drawn.clone()
        self._packed[:2].zero_()
        try:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size, has_cuts)  # Warm-up: kernels compile, and libraries choose theirs, outside the graph.
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._step(size, has_cuts)
            self._pool = self._pool or graph.pool()
            held = self._captured[size, has_cuts] = _Captured(graph=graph, logits=logits)
        except Exception as error:  # A layer may do anything that cannot be captured: run without graphs.
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            warnings.warn(f"decode steps run without CUDA graphs ({reason})", stacklevel=2)
            self._is_on, held = False, None
        self._packed[:2].copy_(given)
        self._drawn.copy_(before)
        return held


def _first_rows(whole: StepInputs, size: int) -> StepInputs:
    return StepInputs(**{name: getattr(whole, name)[:size] for name in StepInputs.__dataclass_fields__})
