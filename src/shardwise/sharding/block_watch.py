"""Find the blocks that a trial may skip: those that run the same operations as an earlier block of their list.

Blocks of one class, with parameters of the same shapes, may still differ in an attribute (a number, a list, a
function), in their arguments and in their buffers. A run on the meta device shows the operations of each block.
"""

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.units import is_block_list
from shardwise.torch_private import EagerDispatchMode, pytree

#: How many elements of a buffer are compared, in addition to its sum.
_SAMPLE = 4_096
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class BlockWatch(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of every block of a module's lists while it runs. `passing` is the result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = {
            f"{name}.{key}" if name else key: block
            for name, each in module.named_modules()
            if is_block_list(each)
            for key, block in each.named_children()
        }
        #: The operations of each block, as hashes; then the blocks that are running now.
        self._done: dict[str, list[int]] = {}
        self._running: list[str] = []
        self._unlike: set[str] = set()
        self._hooks = ExitStack()

    @property
    def passing(self) -> dict[str, Hashable]:
        """Blocks whose output has the shape of their first tensor argument, with a hash of their operations."""
        return {path: hash(tuple(done)) for path, done in self._done.items() if path not in self._unlike}

    def __enter__(self) -> "BlockWatch":
        for path, block in self._blocks.items():
            self._hooks.callback(block.register_forward_pre_hook(partial(self._begin, path), with_kwargs=True).remove)
            self._hooks.callback(block.register_forward_hook(partial(self._end, path), with_kwargs=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _begin(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._done.setdefault(path, []).append(_print((args, kwargs)))
        self._running.append(path)

    def _end(self, path: str, _: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        self._running.remove(path)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if not (isinstance(made, Tensor) and given and given[0].shape == made.shape):
            self._unlike.add(path)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if self._running:
            seen = hash((func, _print((args, kwargs or {}))))
            for path in self._running:
                self._done[path].append(seen)
        return func(*args, **(kwargs or {}))


def _print(given: Any) -> int:
    """Hash arguments: shapes and dtypes of tensors, and plain values."""
    leaves, tree = pytree.tree_flatten(given)
    return hash((str(tree), *(_leaf(each) for each in leaves)))


def _leaf(each: Any) -> Any:
    if isinstance(each, Tensor):
        return tuple(each.shape), each.dtype
    return each if isinstance(each, _PLAIN) else type(each)


def left_out(module: nn.Module, representative: Mapping[str, str], passing: Mapping[str, Hashable]) -> list[str]:
    """Return blocks with the operations and buffers of an earlier block of their list, except each list's last."""
    lasts = {name.rpartition(".")[0]: name for name in representative}
    return [
        name
        for name, first in representative.items()
        if first != name
        and lasts[name.rpartition(".")[0]] != name
        and passing.get(name) is not None
        and passing.get(name) == passing.get(first)
        and _contents(module.get_submodule(name)) == _contents(module.get_submodule(first))
    ]


def _contents(block: nn.Module) -> Hashable:
    """Return a fingerprint of a block's tensors other than parameters: buffers, and tensors in attributes."""
    tensors = dict(block.named_buffers())
    for name, each in block.named_modules():
        tensors |= {f"{name}.{key}": value for key, value in vars(each).items() if isinstance(value, Tensor)}
    return tuple((name, tuple(each.shape), each.dtype, _numbers(each)) for name, each in tensors.items())


@torch.no_grad()
def _numbers(tensor: Tensor) -> Hashable:
    if tensor.is_meta or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _SAMPLE)].cpu()
    return hash((tuple(some.tolist()), flat.sum().item()))
