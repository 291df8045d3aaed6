"""Run a unit on the meta device to learn the outline of its output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.meta_results import find_key, run_or_recall
from shardwise.stages.split.module_copy import copied
from shardwise.torch_private import (
    GROUPED_MM,
    IS_ALL_TRUE,
    LOCAL_SCALAR,
    UNIQUE,
    EagerDispatchMode,
    RunningNormModule,
    pytree,
)

aten = torch.ops.aten
#: The most common types of arguments other than tensors.
_NO_TENSORS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])


#: Operations whose second argument is a list of indices or masks.
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


def _counted(given: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return given.new_empty(max(1, minlength), dtype=torch.long if weights is None else weights.dtype)


def _selected(given: Tensor, mask: Tensor) -> Tensor:
    return given.new_empty((given.to(torch.bool) | mask).numel())


def _unique(given: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements, where each is, and how often."""
    inverse, counts = (given.new_empty(shape, dtype=torch.long) for shape in (given.shape, (given.numel(),)))
    return given.new_empty(given.numel()), inverse, counts


def _unique_along(given: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    inverse, counts = (given.new_empty(given.shape[dim], dtype=torch.long) for _ in range(2))
    return torch.empty_like(given), inverse, counts


def _unique_in_a_row(
    given: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    del return_inverse, return_counts
    return _unique(given) if dim is None else _unique_along(given, dim)


def _repeated(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Return the place of each element, as often as it is repeated."""
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


#: Operations without a kernel for the meta device, as their shapes depend on data. Each element counts as another one.
_BY_DATA: dict[Any, Callable[..., Any]] = {
    aten.bincount.default: _counted,
    aten.masked_select.default: _selected,
    aten.repeat_interleave.Tensor: _repeated,
    UNIQUE.default: _unique,
    aten.unique_consecutive.default: _unique_in_a_row,
    aten.unique_dim.default: _unique_along,
}


class Guesses(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Answers data-dependent operations on meta tensors, so that units that use them can run.

    Sizes are upper bounds: every element counts as nonzero. This carries mixtures of experts through a run without
    data. Without `recalls` every operation is really run, so that a mode below this one sees it.
    """

    def __init__(self, *, recalls: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recalls = recalls
        #: Whether any data-dependent operation was met.
        self.were_asked = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.were_asked |= depends_on_data(func)
        return run_or_guess(func, args, kwargs or {}, recalls=self._recalls)


def run_or_guess(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, recalls: bool = True) -> Any:
    """Return the result of an operation, or a guess in its place: `Guesses` for one operation."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and first.is_meta:
        if func is LOCAL_SCALAR.default:
            return False if first.dtype is torch.bool else 0.0 if first.dtype.is_floating_point else 0
        if func is aten.nonzero.default:
            return first.new_empty((first.numel(), first.dim()), dtype=torch.long)
        if func is aten.equal.default:
            return False
        if func in _BY_DATA:
            return _BY_DATA[func](*args, **kwargs)
        if func is IS_ALL_TRUE.default:
            return torch.ones((), dtype=torch.bool)  # A check of numbers, as in torch.distributions, passes.
        if func is GROUPED_MM.default and first.dim() == 2 and args[1].dim() == 3:
            # Its meta kernel accepts only bf16, unlike the real ones.
            return first.new_empty((first.shape[0], args[1].shape[-1]))
    if func in _INDEXED and any(isinstance(each, Tensor) and each.dtype is torch.bool for each in args[1]):
        # Indexing by a mask: as if the mask selected everything.
        args = (first, [one for each in args[1] for one in _places(each)], *args[2:])
    key = find_key(func, args, kwargs) if recalls else None
    if key is not None:
        return run_or_recall(key, func, args, kwargs)
    if _are_apart(args):
        # A forward often creates tensors on the default device; in a real run all would be on one device.
        args, kwargs = pytree.tree_map(_moved, (args, kwargs))
    return func(*args, **kwargs)


def _places(index: Any) -> list[Any]:
    """Replace a meta mask by index tensors, one for each of its dims."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool or not index.is_meta:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


def depends_on_data(func: Any) -> bool:
    """Whether an operation returns a Python number, or a shape, that depends on the data."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def shapes_by_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of an operation's result depends on the data: the selection of a mask, for example."""
    if func is torch.ops.aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def tensors_of(given: Any) -> list[Tensor]:
    """Return all tensors in the arguments or results of an operation: in tuples, lists and dictionaries.

    A trace calls this twice for every operation, and torch's own pytree takes four times as long.
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
    """Return a copy of a module with its tensors on the meta device: it takes no memory, and a run changes no data."""
    twins: dict[int, Any] = {}
    for parameter in module.parameters():
        twins[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        twins[id(buffer)] = buffer.detach().to("meta")
    twin = copied(module, twins)
    for each in twin.modules():
        if isinstance(each, RunningNormModule) and each.momentum is None:
            each.momentum = 0.1  # Otherwise it divides by its batch count, a meta tensor here.
    return twin


def on_meta(arguments: list[Any]) -> list[Any]:
    """Move the tensors among arguments to the meta device."""
    return [each.detach().to("meta") if isinstance(each, Tensor) else each for each in arguments]


def call_on_meta(
    call: Callable[..., Any], arguments: list[Any], tree: pytree.TreeSpec, guesses: Guesses | None = None
) -> Any:
    """Call with arguments that are on the meta device, given as flat leaves and their structure."""
    args, kwargs = pytree.tree_unflatten(arguments, tree)
    with torch.no_grad(), guesses or Guesses():
        return call(*args, **kwargs)
