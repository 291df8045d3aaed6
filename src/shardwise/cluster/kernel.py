"""The measured speed of each kind of operation on a device, forward and backward, from `shardwise probe`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Kinds that are measured separately. `matmul` and `attention` are counted in FLOPs; `operands` in the bytes that
#: matmuls read and write; `scores` in query-key pairs, and so is `masks`, the additional time of attention with a mask.
#: All others are counted in unfused memory traffic, in bytes. `elementwise` is every operation without a kind of its
#: own. `optimizer` has no backward, and one call for each tensor. Two kinds have only a time per call: `sharded`, the
#: additional time to call a layer, an embedding or a loss that is cut over ranks; and `meeting`, the seconds that ranks
#: lose when they wait for each other, on top of the message itself. `halves` has only a backward: the speed of one in
#: two halves, relative to a whole one, and the additional time of each call that has weights.
KINDS = (
    "matmul", "operands", "attention", "scores", "masks", "norm", "nonlinearity", "rotation", "loss", "elementwise",
    "optimizer", "sharded", "meeting", "halves",
)  # fmt: skip

#: The rate of work that costs nothing.
FREE = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kind of operation: its rate per second, and the fixed seconds of a call."""

    kind: str
    forward: float
    backward: float
    forward_call: float = 0.0
    backward_call: float = 0.0

    def taking_turns(self, share: float) -> "Kernel":
        """Return the same for a process that has this share of a core."""
        if self.kind == "halves":
            return replace(self, backward_call=self.backward_call / share)
        return Kernel(
            kind=self.kind,
            forward=self.forward * share,
            backward=self.backward * share,
            forward_call=self.forward_call / share,
            backward_call=self.backward_call / share,
        )


def meeting_seconds(kernels: Sequence[Kernel]) -> float:
    """Return the seconds lost each time ranks wait for each other; 0 if not measured."""
    found = find_kernel(kernels, "meeting")
    return 0.0 if found is None else found.forward_call


class Split(NamedTuple):
    """The additional time of a backward in two halves: a fraction of a whole one, and a time for each weighted call."""

    fraction: float
    call_seconds: float


def find_split(kernels: Sequence[Kernel]) -> Split:
    """Return the additional time of split backwards; zeros if it was not measured."""
    found = find_kernel(kernels, "halves")
    return Split(0.0, 0.0) if found is None else Split(max(1.0 / found.backward - 1.0, 0.0), found.backward_call)


def find_kernel(kernels: Sequence[Kernel], kind: str) -> Kernel | None:
    return next((kernel for kernel in kernels if kernel.kind == kind), None)


def get_kernel(kernels: Sequence[Kernel], kind: str) -> Kernel:
    """Return the kernel of this kind, or the elementwise one if this kind was not measured."""
    found = {kernel.kind: kernel for kernel in kernels}
    return found.get(kind) or found["elementwise"]
