"""Which part of every parameter a rank of a mesh has: of its layers (tp), and of its experts (ep)."""

from typing import Any

from torch import Tensor

from shardwise.sharding.expert.sharding import ExpertSharding
from shardwise.sharding.tensor.sharding import Sharding
from shardwise.sharding.tensor.shards import Shards


class MeshParts:
    """Whole parameters from parts, and parts of whole ones. All ranks call it alike."""

    def __init__(self, tensor: Sharding | None, experts: ExpertSharding | None) -> None:
        self._tensor, self._experts = tensor, experts

    def of(self, name: str) -> Any:
        """How one lies on tensor parallel ranks; its `shape` is that of the whole, with the experts of all ranks."""
        if self._tensor is not None:
            return self._tensor.of(name)
        assert self._experts is not None, "without parts nothing is asked"
        return Shards(shape=tuple(self._experts.twin.get_parameter(name).shape))

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole of a parameter, or of anything that lies like it, from the parts of all ranks."""
        part = local if self._experts is None else self._experts.gather(name, local)
        return part if self._tensor is None else self._tensor.gather(name, part)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of it."""
        part = whole if self._tensor is None else self._tensor.local(name, whole)
        return part if self._experts is None else self._experts.local(name, part)
