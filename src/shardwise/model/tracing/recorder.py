"""Every call that reaches torch's kernels, noted under the block that made it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.model.operations import Operation
from shardwise.model.tracing.products import Setting, expert_weights, find_operation
from shardwise.torch_private import (
    CUDNN_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_BACKWARD,
    FLASH_ON_CPU_BACKWARD,
    GROUPED_MM,
    LOCAL_SCALAR,
    TO_COPY,
    FakeTensor,
    TorchDispatchMode,
    is_mutable,
    pytree,
    storage_id,
)

aten = torch.ops.aten

# Backward kernels that multiply matrices: their arithmetic follows from the forward, and they stream through no memory.
_BACKWARD_PRODUCTS = {
    aten.convolution_backward.default,
    FLASH_ON_CPU_BACKWARD.default,
    FLASH_BACKWARD.default,
    EFFICIENT_ATTENTION_BACKWARD.default,
    CUDNN_ATTENTION_BACKWARD.default,
    aten.embedding_dense_backward.default,
}

_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


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
    """Return an id of a tensor's memory, unique as long as both are kept."""
    return storage_id(tensor.untyped_storage())


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and mappings."""
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls while it is on. `segments` are in the order of the forward, and the last is where it is now."""

    def __init__(self, parameters: Mapping[str, Tensor], *, num_samples: int, num_positions: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments = [Segment(path=None)]
        self.is_forward = True
        self._back = self.segments[0]
        # Views of parameters share their storage. Casts do not, and are added as they are made.
        self._sources = {key_of(tensor): key_of(tensor) for tensor in parameters.values()}
        # Storages, not tensors: autograd copies a gradient that other code holds too.
        self._kept_alive: list[Any] = [tensor.untyped_storage() for tensor in parameters.values()]
        self._saved: set[int] = set()
        self._makers: dict[int, Segment] = {}
        self._setting = Setting(num_samples=num_samples, num_positions=num_positions, parameter=self._parameter)

    def enter(self, path: str | None) -> Segment:
        """Begin another piece of the forward."""
        self.segments.append(Segment(path=path))
        return self.segments[-1]

    def turn(self) -> None:
        """Begin the backward, in the last piece."""
        self.is_forward = False
        self._back = self.segments[-1]

    def back_into(self, segment: Segment, gradient: Tensor) -> None:
        """A piece's output has its gradient: what follows is its backward. The one before had to write it."""
        self._back.backward.wanted.add(key_of(gradient))
        self._back = segment

    def keep(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor for the backward. Parameters are there anyway, and a tensor counts once."""
        key = key_of(tensor)
        if key not in self._saved and key not in self._sources:
            self._saved.add(key)
            self._kept_alive.append(tensor.untyped_storage())
            segment = self._keeper(key)
            size = tensor.untyped_storage().nbytes()
            segment.saved[tensor.dtype] = segment.saved.get(tensor.dtype, 0) + size
            segment.forward.wanted.add(key)
        return tensor

    def _keeper(self, key: int) -> Segment:
        """Return the owner of a kept tensor: the first block that keeps it, except for tensors made between blocks for
        all.

        A rotation's angles are kept by the first layer and used by every one. A layer's own input is its own.
        """
        here = self.segments[-1]
        maker = self._makers.get(key, here)
        return maker if maker.path is None and key != here.input_key else here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func.namespace == "prim":  # Questions such as where a tensor is.
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        segment = self.segments[-1] if self.is_forward else self._back
        # Read before the call: what it writes in place has other needs of gradients after it.
        operation = find_operation(func, args, kwargs, self._setting) if self.is_forward else None
        result = answer(args, kwargs) if (answer := _find_answer(func, args)) else func(*args, **kwargs)
        outputs = tensors_in(result)
        self._kept_alive += [tensor.untyped_storage() for tensor in (*inputs, *outputs)]
        if self.is_forward:
            for tensor in outputs:
                self._makers.setdefault(key_of(tensor), segment)
            self._note_parameters(func, args, inputs, outputs, segment)
        moved = segment.forward if self.is_forward else segment.backward
        if operation is not None:
            segment.operations.append(operation)
            moved.wanted.update(map(key_of, inputs))
        elif func in _BACKWARD_PRODUCTS or (not self.is_forward and _is_product(func)):
            moved.wanted.update(map(key_of, inputs))
        else:
            _note_moves(func, inputs, outputs, moved)
        return result

    def _parameter(self, tensor: Tensor) -> int | None:
        return self._sources.get(key_of(tensor))

    def _note_parameters(
        self, func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor], segment: Segment
    ) -> None:
        for tensor in inputs:
            source = self._parameter(tensor)
            if source is not None:
                segment.parameters[source] = None
        experts = expert_weights(func, args)
        if experts is not None and (source := self._parameter(experts)) is not None:
            segment.experts.add(source)
        if func is TO_COPY.default and (source := self._parameter(inputs[0])) is not None:
            self._sources[key_of(outputs[0])] = source


def _note_moves(func: Any, inputs: list[Tensor], outputs: list[Tensor], moved: Moved) -> None:
    """Bytes of a kernel that is no product. Views and empty tensors move nothing; what writes in place does."""
    if func in _EMPTY:
        return
    read = {key_of(tensor): bytes_of(tensor) for tensor in inputs}
    written = {key_of(tensor): bytes_of(tensor) for tensor in outputs}
    mutates = is_mutable(func)
    if not mutates:
        written = {key: size for key, size in written.items() if key not in read}
    if not written:
        return
    moved.read += sum(read.values())
    moved.written += sum(written.values())
    for key, size in read.items():
        moved.inputs[key] = max(size, moved.inputs.get(key, 0))
    moved.outputs.update(written)


def _is_product(func: Any) -> bool:
    return func in {aten.mm.default, aten.addmm.default, aten.bmm.default, GROUPED_MM.default}


def _find_answer(func: Any, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return the replacement of a torch operator for fake tensors, if torch has none.

    A yes or no is answered with no: modules ask such things to take a shorter way.
    """
    first = args[0] if args else None
    if not isinstance(first, FakeTensor):
        return None
    if func is GROUPED_MM.default:  # Without numbers torch does bfloat16 only, though its kernels do all types.
        return _grouped
    if func is LOCAL_SCALAR.default and first.dtype is torch.bool:
        return _no
    return None


def _no(*_: Any) -> bool:
    return False


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a grouped product, without values. Two matrices give one for each group."""
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 2:
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        return left.new_empty((offsets.numel(), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))
