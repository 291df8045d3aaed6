"""The outline of what a call returns: structure and shapes, without values.

A stage that does not need what another stage computes still runs the glue around it, and glue reads shapes. So it gets
placeholders: tensors of the right shape that take up no memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import pytree

#: Values other than tensors that a call may return, and that every stage can return without running it.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


#: Python numbers that can be sent to another stage, with the dtype used.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_CONSTANTS = (*_NUMBERS, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def placeholder(self, device: torch.device, *, writable: bool = False) -> Tensor:
        """Return zeros of this shape. They share one element's memory unless they have to be writable."""
        if writable:
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True, slots=True)
class NumberOutline(TensorOutline):
    """A Python number that a call computed from data. It is sent to other stages as a tensor without dims."""

    kind: type

    @classmethod
    def of(cls, number: bool | int | float) -> "NumberOutline":
        return cls((), _NUMBERS[type(number)], type(number))


@dataclass(frozen=True, slots=True)
class Passed:
    """A returned leaf that is one of the arguments, unchanged: its index among them."""

    argument: int


@dataclass(frozen=True, slots=True)
class Again:
    """A tensor that is returned more than once: the index of its first leaf."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The structure of what a call returns, and its leaves: `TensorOutline`, `Passed`, `Again`, or the value itself."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    #: The tensors that the call creates, by leaf.
    tensors: dict[int, TensorOutline]
    #: Numbers and strings that other stages take from here: they must be the same in every run.
    constants: dict[int, Any]

    @classmethod
    def of(cls, tree: pytree.TreeSpec, leaves: Sequence[Any]) -> "Outline":
        tensors = {leaf: each for leaf, each in enumerate(leaves) if isinstance(each, TensorOutline)}
        constants = {leaf: each for leaf, each in enumerate(leaves) if isinstance(each, _CONSTANTS)}
        return cls(tree, tuple(leaves), tensors, constants)

    @property
    def passes(self) -> bool:
        """Whether any argument is passed through."""
        return any(isinstance(leaf, Passed) for leaf in self.leaves)

    @property
    def strange(self) -> list[str]:
        """Types of unknown leaves, whose contents cannot be tracked."""
        known = (TensorOutline, Passed, Again, *PLAIN)
        return [type(leaf).__name__ for leaf in self.leaves if not isinstance(leaf, known)]

    def filled(self, tensors: Mapping[int, Tensor], arguments: list[Any]) -> Any:
        """Return what the call returns, given its tensors by leaf, and its arguments."""
        leaves: list[Any] = []
        for leaf, each in enumerate(self.leaves):
            if isinstance(each, NumberOutline):
                leaves.append(each.kind(tensors[leaf].item()))
            elif isinstance(each, TensorOutline):
                leaves.append(tensors[leaf])
            elif isinstance(each, Again):
                leaves.append(leaves[each.leaf])
            else:
                leaves.append(arguments[each.argument] if isinstance(each, Passed) else each)
        return leaves[0] if self.tree.is_leaf() else pytree.tree_unflatten(leaves, self.tree)


def outline_of(
    returned: Any, arguments: list[Any], changed: Collection[int] = (), *, sends_numbers: bool = False
) -> Outline:
    """Return the outline of what a call returned, given its flattened arguments, and which of them it wrote to.

    `sends_numbers`: Python numbers depend on data.
    """
    leaves, tree = pytree.tree_flatten(returned)
    position = {
        id(each): index for index, each in enumerate(arguments) if not isinstance(each, PLAIN) and index not in changed
    }
    outlined: list[Any] = []
    first: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if id(leaf) in position:
            outlined.append(Passed(position[id(leaf)]))
        elif isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number:
            outlined.append(Again(first[id(leaf)]))
        elif isinstance(leaf, Tensor):
            outlined.append(TensorOutline(tuple(leaf.shape), leaf.dtype))
        elif sends_numbers and type(leaf) in _NUMBERS:
            outlined.append(NumberOutline.of(leaf))
        else:
            outlined.append(leaf)
    return Outline.of(tree, outlined)


def leaves_of(given: Any) -> list[Any]:
    """Return the same as `pytree.tree_leaves`, faster for tuples, lists and dictionaries, which most arguments are."""
    found: list[Any] = []
    _gather(given, found)
    return found


def _gather(given: Any, found: list[Any]) -> None:
    kind = type(given)
    if kind is Tensor or given is None:
        found.append(given)
    elif kind is tuple or kind is list:
        for each in given:
            _gather(each, found)
    elif kind is dict:
        for each in given.values():
            _gather(each, found)
    elif kind in PLAIN:
        found.append(given)
    else:
        found += pytree.tree_leaves(given)


def signature_of(arguments: list[Any]) -> tuple[Any, ...]:
    """Return what the outline of a call depends on: shapes and dtypes of tensors, plain values, types of the rest."""
    return tuple(
        (each.shape, each.dtype) if isinstance(each, Tensor) else each if isinstance(each, PLAIN) else type(each)
        for each in arguments
    )


def open_dataclasses(given: Any, kind: type = Tensor) -> None:
    """Register dataclasses that hold tensors as pytree nodes, so that torch looks into them as it does into tuples.

    `kind`: the type that replaces tensors, if they were taken out."""
    while kinds := {type(each) for each in leaves_of(given) if _is_closed(each, kind)}:
        for each in kinds:  # Others may be inside of them.
            pytree.register_dataclass(each)


def _is_closed(value: Any, kind: type) -> bool:
    """Whether it is a dataclass that holds tensors, maybe in others of its kind, and that torch does not look into."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    held = leaves_of([getattr(value, each.name) for each in fields(value)])
    return any(isinstance(each, kind) or _is_closed(each, kind) for each in held)


def tensors_in(given: Any) -> list[Tensor]:
    """Return all tensors, in order."""
    open_dataclasses(given)
    return [each for each in leaves_of(given) if isinstance(each, Tensor)]


def has_numbers_elsewhere(each: Any) -> bool:
    """Whether it is a tensor of ours that stands for others: logits of which a rank has some words, or that are not
    computed yet. Its `whole()` returns them."""
    return callable(getattr(type(each), "whole", None))


def ordinary(value: Any) -> Any:
    """Return an ordinary tensor for one of ours: other stages are sent its numbers, and send gradients of these."""
    while has_numbers_elsewhere(value):
        value = value.whole()
    return value
