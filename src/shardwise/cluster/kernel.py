"""How fast operations of one kind are on a device: measured, forward and backward, as `shardwise probe` does it."""

from collections.abc import Sequence
from dataclasses import dataclass

#: What is measured by itself. Matmuls and attention are counted in FLOPs, `operands` in the bytes that matmuls read and
#: write, `scores` in pairs of a query and a key, and so are `masks`: what attention takes longer where it is given one.
#: Everything else is counted in the bytes that pass through memory where nothing is fused; `elementwise` is every
#: operation without a kind of its own, and `optimizer` has no backward, and a call for each tensor. Two are calls
#: alone: `sharded`, what a layer that is cut over ranks takes longer to call, and a `meeting`, the seconds that ranks
#: lose where they wait for each other, beside those of the message. Of `halves`, `backward` is the speed of a backward
#: in two halves, where that of a whole one is 1.
KINDS = (
    "matmul", "operands", "attention", "scores", "masks", "norm", "nonlinearity", "rotation", "loss", "elementwise",
    "optimizer", "sharded", "meeting", "halves",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kind: how much of it a second, and the seconds of a call however little there is to do."""

    kind: str
    forward: float
    backward: float
    forward_call: float = 0.0
    backward_call: float = 0.0

    def taking_turns(self, share: float) -> "Kernel":
        """The same where a process has this share of a core."""
        if self.kind == "halves":
            return self
        return Kernel(
            kind=self.kind,
            forward=self.forward * share,
            backward=self.backward * share,
            forward_call=self.forward_call / share,
            backward_call=self.backward_call / share,
        )


def meeting_seconds(kernels: Sequence[Kernel]) -> float:
    """What is lost at each meeting of ranks; nothing where that was not measured."""
    found = find_kernel(kernels, "meeting")
    return 0.0 if found is None else found.forward_call


def split_overhead(kernels: Sequence[Kernel]) -> float:
    """How much longer a backward in two halves takes than a whole one, as a fraction; 0 if that was not measured."""
    found = find_kernel(kernels, "halves")
    return 0.0 if found is None else max(1.0 / found.backward - 1.0, 0.0)


def find_kernel(kernels: Sequence[Kernel], kind: str) -> Kernel | None:
    return next((kernel for kernel in kernels if kernel.kind == kind), None)


def get_kernel(kernels: Sequence[Kernel], kind: str) -> Kernel:
    """The kernel of this kind; a kind that was not measured is as any elementwise operation."""
    found = {kernel.kind: kernel for kernel in kernels}
    return found.get(kind) or found["elementwise"]
