"""What a rank holds of the state of the model, in bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from shardwise.states.buckets.bucket import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on this rank. `optimizer` has its states, and the weights in full precision that it works on.

    Of parameters that are trained, at 2 bytes each with Adam, that is 16 a parameter in all under zero=0 (2 + 2 + 12),
    4 + 12/N under 1, 2 + 14/N under 2 and 16/N under 3 on N ranks. In full precision only it is 4 + 4 + 8: 16, then
    8 + 8/N, 4 + 12/N and 16/N.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def measure(buckets: Sequence[Bucket], optimizers: Iterable[Optimizer], owned: Sequence[Tensor]) -> Held:
    """Add up the tensors that are there."""
    states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
    masters = [bucket.master for bucket in buckets if bucket.master is not None]
    return Held(
        parameters=sum(bucket.weights.num_bytes for bucket in buckets),
        gradients=sum(bucket.gradients.num_bytes for bucket in buckets if bucket.gradients is not None),
        # A count of steps is one number and no state to speak of, but it is there.
        optimizer=sum(_bytes(each) for each in [*states, *owned] if isinstance(each, Tensor))
        # They may live on the host.
        + sum(each.untyped_storage().nbytes() for each in masters),
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
