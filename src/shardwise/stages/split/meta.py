"""A unit run without numbers, on the meta device, to learn the outline of what it returns."""

import copy
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.torch_private import GROUPED_MM, LOCAL_SCALAR, EagerDispatchMode, pytree

aten = torch.ops.aten


class Guesses(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about numbers where there are none, so that units which ask them get through.

    The answers are such that sizes are upper bounds: every element is counted as nonzero. That is how far experts of a
    mixture get without data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Whether anything was asked.
        self.were_asked = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        first = args[0] if args else None
        self.were_asked |= depends_on_data(func)
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
        if _are_apart(args):
            # A forward that makes a tensor often does not say where: with numbers, all would be in one place.
            args, kwargs = pytree.tree_map(_moved, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def depends_on_data(func: Any) -> bool:
    """Whether an operation makes something of numbers that is no tensor: a number, or a shape."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def tensors_of(given: Any) -> list[Tensor]:
    """All tensors among the arguments or results of an operation, which come in tuples, lists and dictionaries.

    A trace asks this of every operation, twice: torch's own way to look into a tree takes four times as long.
    """
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        return []
    return [tensor for each in given for tensor in tensors_of(each)]


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
    return copied(module, twins)


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module, with other tensors in the place of those in `memo`; so is what its functions refer to."""
    for each in module.modules():
        for held in vars(each).values():
            # What weight_norm leaves behind is a result, and nothing that can be copied.
            if isinstance(held, Tensor) and not held.is_leaf:
                memo.setdefault(id(held), held.detach().to("meta"))
    twin = copy.deepcopy(module, memo)
    for each in twin.modules():
        # A forward that a user put there holds, as a rule, the one that was there before: the original's.
        own = vars(each).get("forward")
        if isinstance(own, FunctionType) and own.__closure__:
            cells = tuple(CellType(_within(cell.cell_contents, memo)) for cell in own.__closure__)
            other = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, cells)
            other.__kwdefaults__, other.__signature__ = own.__kwdefaults__, inspect.signature(own)  # type: ignore[attr-defined]
            vars(each)["forward"] = other
    return twin


def _within(held: Any, memo: dict[int, Any]) -> Any:
    """What a function refers to, if it is a part of a module that was copied: the part of the copy."""
    if isinstance(held, MethodType) and id(held.__self__) in memo:
        return MethodType(held.__func__, memo[id(held.__self__)])
    return memo.get(id(held), held) if isinstance(held, (nn.Module, Tensor)) else held


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
