"""What was seen in one piece of a run: one call of a block, or what lies between two of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.model.operations import Operation
from shardwise.torch_private import pytree, storage_id


@dataclass(slots=True)
class Moved:
    """Memory that passed through kernels that are no products, in one direction.

    `read` and `written` are bytes as plain torch moved them. The sets hold storages: what such kernels read and wrote,
    and what others read. A fused kernel does not write what only the next kernel of its kind reads.
    """

    read: int = 0
    written: int = 0
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    @property
    def fused_read(self) -> int:
        return sum(size for key, size in self.inputs.items() if key not in self.outputs)

    @property
    def fused_written(self) -> int:
        return sum(size for key, size in self.outputs.items() if key in self.wanted)


@dataclass(slots=True)
class Segment:
    """One piece: the block's path (None: between blocks), and what it did. Sizes in and out are of the whole batch."""

    path: str | None
    operations: list[Operation] = field(default_factory=list)
    forward: Moved = field(default_factory=Moved)
    backward: Moved = field(default_factory=Moved)
    saved: dict[torch.dtype, int] = field(default_factory=dict)
    parameters: dict[int, None] = field(default_factory=dict)
    experts: set[int] = field(default_factory=set)
    input_key: int | None = None
    input_elements: int = 0
    output_elements: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.operations or self.forward.read or self.forward.written or self.parameters)


def key_of(tensor: Tensor) -> int:
    """What tells the memory of two tensors apart, for as long as both are kept."""
    return storage_id(tensor.untyped_storage())


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and mappings."""
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
