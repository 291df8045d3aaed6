"""A unit run without numbers, on the meta device, to learn the outline of what it returns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.meta_results import find_key, run_or_recall
from shardwise.stages.split.module_copy import copied
from shardwise.torch_private import GROUPED_MM, LOCAL_SCALAR, EagerDispatchMode, RunningNormModule, pytree

aten = torch.ops.aten
#: What operations are given most often beside tensors.
_NO_TENSORS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])


#: Operations that take a list of places, or of masks, after the tensor that they are about.
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Guesses(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about numbers where there are none, so that units which ask them get through.

    The answers are such that sizes are upper bounds: every element is counted as nonzero. That is how far experts of a
    mixture get without data. Without `recalls` every operation is run, so that whoever watches below sees it.
    """

    def __init__(self, *, recalls: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recalls = recalls
        #: Whether anything was asked.
        self.were_asked = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.were_asked |= depends_on_data(func)
        return run_or_guess(func, args, kwargs or {}, recalls=self._recalls)


def run_or_guess(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, recalls: bool = True) -> Any:
    """What an operation returns, or what is answered in its place: `Guesses` for one operation."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.is_meta:
        if func is LOCAL_SCALAR.default:
            return False if first.dtype is torch.bool else 0.0 if first.dtype.is_floating_point else 0
        if func is aten.nonzero.default:
            return first.new_empty((first.numel(), first.dim()), dtype=torch.long)
        if func is aten.equal.default:
            return False
        if func is GROUPED_MM.default and first.dim() == 2 and args[1].dim() == 3:
            # Its meta kernel takes bf16 alone, though the real ones do not.
            return first.new_empty((first.shape[0], args[1].shape[-1]))
    if func in _INDEXED and any(isinstance(each, Tensor) and each.dtype is torch.bool for each in args[1]):
        # A choice by a mask: as if it chose everything.
        args = (first, [one for each in args[1] for one in _places(each)], *args[2:])
    key = find_key(func, args, kwargs) if recalls else None
    if key is not None:
        return run_or_recall(key, func, args, kwargs)
    if _are_apart(args):
        # A forward that makes a tensor often does not say where: with numbers, all would be in one place.
        args, kwargs = pytree.tree_map(_moved, (args, kwargs))
    return func(*args, **kwargs)


def _places(index: Any) -> list[Any]:
    """What chooses as a mask does, in the form of places along each of its dims."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool or not index.is_meta:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


def depends_on_data(func: Any) -> bool:
    """Whether an operation makes something of numbers that is no tensor: a number, or a shape."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def shapes_by_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of what an operation makes depends on numbers: what a mask selects."""
    if func is torch.ops.aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def tensors_of(given: Any) -> list[Tensor]:
    """All tensors among the arguments or results of an operation, which come in tuples, lists and dictionaries.

    A trace asks this of every operation, twice: torch's own way to look into a tree takes four times as long.
    """
    if type(given) in _NO_TENSORS:
        return []
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        return []
    return [tensor for each in given if type(each) not in _NO_TENSORS for tensor in tensors_of(each)]


def _are_apart(args: tuple[Any, ...]) -> bool:
    """Whether some tensors among arguments are on the meta device and others are not."""
    places = set()
    for given in args:
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, Tensor) and each.dim():
                places.add(each.is_meta)
    return len(places) > 1


def _moved(each: Any) -> Any:
    return each.to("meta") if isinstance(each, Tensor) and each.dim() else each


def is_on_meta(module: nn.Module) -> bool:
    """Whether every tensor of a module is on the meta device."""
    return all(each.is_meta for each in [*module.parameters(), *module.buffers()])


def has_meta(module: nn.Module) -> bool:
    """Whether any tensor of a module is on the meta device."""
    return any(each.is_meta for each in [*module.parameters(), *module.buffers()])


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors are on the meta device: it takes up no memory, and has no numbers to spoil."""
    twins: dict[int, Any] = {}
    for parameter in module.parameters():
        twins[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        twins[id(buffer)] = buffer.detach().to("meta")
    twin = copied(module, twins)
    for each in twin.modules():
        if isinstance(each, RunningNormModule) and each.momentum is None:
            each.momentum = 0.1  # Else it divides by how many batches it has seen, which is no number here.
    return twin


def on_meta(arguments: list[Any]) -> list[Any]:
    """Arguments with their tensors on the meta device."""
    return [each.detach().to("meta") if isinstance(each, Tensor) else each for each in arguments]


def call_on_meta(
    call: Callable[..., Any], arguments: list[Any], tree: pytree.TreeSpec, guesses: Guesses | None = None
) -> Any:
    """Call with arguments that are on the meta device, given as flat leaves and their structure."""
    args, kwargs = pytree.tree_unflatten(arguments, tree)
    with torch.no_grad(), guesses or Guesses():
        return call(*args, **kwargs)
