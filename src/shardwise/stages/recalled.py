"""What a layer's forward keeps of what is dear to compute, so that its second forward need not compute it.

    first forward      every matmul, convolution and attention is noted with what it made, in order
    second forward     it is given that again, in the same order; all else is computed

Something that was written into since (`relu_` on what a linear layer made) is computed again. A function of autograd
that sums over ranks what it multiplies notes the sum itself: `taken` and `keep`. What a trial on shapes multiplies
(under context parallelism the last stage has one before its first loss) is not noted.
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
#: What is dear to compute and small to keep. Names, as not every version and build of torch has all of them.
_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward",
)  # fmt: skip
DEAR = frozenset(getattr(_ATEN, name).default for name in _NAMES if hasattr(_ATEN, name))

_local = threading.local()


class _Notes:
    """What was made, by what made it, in order."""

    def __init__(self, counted: Kept | None) -> None:
        self._made: dict[Hashable, deque[tuple[Any, list[int]]]] = {}
        self._counted = counted

    def add(self, maker: Hashable, made: Any) -> None:
        kept = pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, made)
        tensors = _tensors(kept)
        self._made.setdefault(maker, deque()).append((kept, [version_of(each) for each in tensors]))
        if self._counted is not None:
            self._counted.add(tensors)

    def take(self, maker: Hashable) -> Any | None:
        """What it made the next time; None if that is not there any more."""
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
    """Whether tensors have shapes and no numbers: somebody tries a layer within the first forward, and not again."""
    return any(each.is_meta for each in args if isinstance(each, Tensor))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation. Functions of ours find it by its thread."""

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
        if func in DEAR and not _is_a_trial(args):
            self.notes.add(func, made)
        return made


class _Second(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self.notes.take(func) if func in DEAR and not _is_a_trial(args) else None
        return func(*args, **(kwargs or {})) if found is None else found


def recalling(counted: Kept | None = None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Where a forward is run that keeps what is dear, told to `counted`, and where it is run again."""
    notes = _Notes(counted)
    return _First(notes), _Second(notes)


def keep(maker: Hashable, made: Any) -> None:
    """Note what a function has made, in a first forward."""
    mode = getattr(_local, "mode", None)
    if isinstance(mode, _First):
        mode.notes.add(maker, made)


def taken(maker: Hashable) -> Any | None:
    """What a function made in the first forward, in the second."""
    mode = getattr(_local, "mode", None)
    return mode.notes.take(maker) if isinstance(mode, _Second) else None
