"""Which blocks of a list need not be run in a trial: those that do, operation by operation, what an earlier one does.

Blocks of one class, with parameters of the same shapes, may still differ in what a number, a list or a function of
theirs says, in what they are called with, and in what their buffers hold. What they do shows in a run without numbers.
"""

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.units import is_block_list
from shardwise.torch_private import EagerDispatchMode, pytree

#: So many numbers of a buffer are compared, beside its sum.
_SAMPLE = 4_096
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class BlockWatch(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while a module runs, what each block of its lists does. `passing` then has what may be left out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = {
            f"{name}.{key}" if name else key: block
            for name, each in module.named_modules()
            if is_block_list(each)
            for key, block in each.named_children()
        }
        #: Of each block, all of its operations, as hashes; and those that are being run.
        self._done: dict[str, list[int]] = {}
        self._running: list[str] = []
        self._unlike: set[str] = set()
        self._hooks = ExitStack()

    @property
    def passing(self) -> dict[str, Hashable]:
        """Blocks that return a tensor like the first that they are given, and what each does."""
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
    """What is given, in a number: shapes and types of tensors, and plain values."""
    leaves, tree = pytree.tree_flatten(given)
    return hash((str(tree), *(_leaf(each) for each in leaves)))


def _leaf(each: Any) -> Any:
    if isinstance(each, Tensor):
        return tuple(each.shape), each.dtype
    return each if isinstance(each, _PLAIN) else type(each)


def left_out(module: nn.Module, representative: Mapping[str, str], passing: Mapping[str, Hashable]) -> list[str]:
    """Blocks that do what an earlier one of their list does, with the same numbers in buffers; not the last of it."""
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
    """What a block holds beside its parameters: buffers, and tensors in attributes."""
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
