"""Selective recomputation: a layer's forward keeps expensive results, so that its second forward can reuse them.

    first forward      the output of every matmul, convolution and attention is recorded, in order
    second forward     these outputs are returned again, in the same order; all else is computed

An output written to since (`relu_` on that of a linear layer) is computed again. So is one that is cut into parts whose
writes are not counted (`unsafe_chunk`), as in recurrent layers of torch. An autograd function that sums products over
ranks records the sum itself with `keep`, and reads it with `taken`. The matmuls of a trial on the meta device (under
context parallelism the last stage has one before its first loss) are not recorded.
"""

import threading
from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardwise.stages.activation_bytes import Kept
from shardwise.torch_private import TorchDispatchMode, pytree, version_of

_ATEN = torch.ops.aten
#: Operations that are expensive to compute and small to keep. By name, as not every build of torch has all of them.
_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward",
)  # fmt: skip
DEAR = frozenset(getattr(_ATEN, name).default for name in _NAMES if hasattr(_ATEN, name))
#: Operations whose results share memory with their argument and do not share its count of writes.
_UNCOUNTED = frozenset(
    getattr(_ATEN, name).default if name.endswith("sizes") else getattr(_ATEN, name).Tensor
    for name in ("unsafe_split", "unsafe_split_with_sizes")
)

_local = threading.local()


class _Notes:
    """Recorded outputs, by operation, in order."""

    def __init__(self, counted: Kept | None) -> None:
        self._made: dict[Hashable, deque[tuple[Any, list[int]]]] = {}
        self._counted = counted
        #: The counts of writes of each output, by its address: all are alive.
        self._at: dict[int, list[int]] = {}

    def add(self, maker: Hashable, made: Any) -> None:
        kept = pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, made)
        tensors = _tensors(kept)
        versions = [version_of(each) for each in tensors]
        self._made.setdefault(maker, deque()).append((kept, versions))
        self._at.update((each.data_ptr(), versions) for each in tensors)
        if self._counted is not None:
            self._counted.add(tensors)

    def drop(self, tensor: Tensor) -> None:
        """Let an output be computed again."""
        versions = self._at.get(tensor.data_ptr())
        if versions is not None:
            versions.append(-1)

    def take(self, maker: Hashable) -> Any | None:
        """Return the next recorded output of an operation; None if there is none, or if it was written to since."""
        noted = self._made.get(maker)
        if not noted:
            return None
        made, versions = noted.popleft()
        if [version_of(each) for each in _tensors(made)] != versions:
            return None
        return pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, made)


def _tensors(made: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]


def _is_a_trial(args: Any) -> bool:
    """Whether tensors are on the meta device: from a trial within the first forward, which the second lacks."""
    return any(each.is_meta for each in args if isinstance(each, Tensor))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation. `keep` and `taken` find it by its thread."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes = notes

    def __enter__(self) -> "_Mode":
        self._outer = getattr(_local, "mode", None)
        _local.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _local.mode = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class _First(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _UNCOUNTED:
            self.notes.drop(args[0])
        if func in DEAR and not _is_a_trial(args):
            self.notes.add(func, made)
        return made


class _Second(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.notes.take(func) if func in DEAR and not _is_a_trial(args) else None
        return func(*args, **(kwargs or {})) if found is None else found


def recalling(counted: Kept | None = None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts: for a forward that keeps expensive results, counted by `counted`, and for its rerun."""
    notes = _Notes(counted)
    return _First(notes), _Second(notes)


def keep(maker: Hashable, made: Any) -> None:
    """Record the output of a function, in a first forward."""
    mode = getattr(_local, "mode", None)
    if isinstance(mode, _First):
        mode.notes.add(maker, made)


def taken(maker: Hashable) -> Any | None:
    """Return the recorded output of a function, in a second forward; otherwise None."""
    mode = getattr(_local, "mode", None)
    return mode.notes.take(maker) if isinstance(mode, _Second) else None
