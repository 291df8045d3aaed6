"""Writes a rank's order as its authors describe it: "three forwards of this chunk, then a pair"."""

from shardwise.schedule.instruction import Instruction, Kind, overlapped
from shardwise.schedule.placement import Placement


class Writer:
    """The order of one rank, written instruction by instruction: each takes its stage's next microbatch."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self.order: list[Instruction] = []
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._written: dict[tuple[Kind, int], int] = {}
        self._pending_weights: list[Instruction] = []

    def forward(self, stage: int) -> None:
        self._write(self._next(Kind.F, stage))

    def input_gradient(self, stage: int) -> None:
        """Write an I; its W is due later."""
        instruction = self._next(Kind.I, stage)
        self._write(instruction)
        self._pending_weights.append(instruction._replace(kind=Kind.W))

    def weight_gradient(self, stage: int | None = None) -> None:
        """Write the oldest W that is due (of one stage, if given)."""
        due = next((each for each in self._pending_weights if stage is None or each.stage == stage), None)
        if due is not None:
            self._pending_weights.remove(due)
            self._write(due)

    def weight_gradients_left(self) -> None:
        """Write every W that is still due."""
        while self._pending_weights:
            self.weight_gradient()

    def backward(self, stage: int) -> None:
        self._write(self._next(Kind.I, stage)._replace(kind=Kind.B))

    def pair(self, ahead: int, back: int) -> None:
        """Write a forward of one stage overlapped with a backward of another."""
        self._write(overlapped(self._next(Kind.F, ahead), self._next(Kind.I, back)._replace(kind=Kind.B)))

    def _next(self, kind: Kind, stage: int) -> Instruction:
        count = self._written.get((kind, stage), 0)
        self._written[kind, stage] = count + 1
        pipes = self._placement.pipes
        pipe = next(number for number, stages in enumerate(pipes) if stage in stages)
        return Instruction(kind, stage, pipe + count * len(pipes))

    def _write(self, instruction: Instruction) -> None:
        # A pattern that needs more microbatches than there are is written whole, less what does not exist.
        if instruction.microbatch < self._num_microbatches:
            self.order.append(instruction)
