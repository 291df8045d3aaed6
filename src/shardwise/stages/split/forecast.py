"""Predict what a unit of another stage returns: its outline, for arguments of any shape.

Sequence lengths and microbatch sizes change between steps. The outline on the example is known. For other shapes the
unit is run on the meta device, once per shape. The shapes of the whole batch count too: a rank with a shard of a
sequence may get shards of one shape for sequences of two lengths, and return the whole sequence.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.filled_containers import filling, opened
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.split.meta import call_on_meta, is_on_meta, meta_twin, on_meta
from shardwise.stages.split.outline import Outline, TensorOutline, leaves_of, outline_of, signature_of
from shardwise.stages.split.unit_flow import UnitCall
from shardwise.stages.stage import Batch
from shardwise.torch_private import forward_hooks, pytree, remove_hooks_but

#: The largest number of cached stand-ins.
_MOST_KNOWN = 1_000


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a call would return: its outline, and a placeholder for each tensor that is not written to later."""

    outline: Outline
    tensors: dict[int, Tensor]


class Forecast:
    """Stand-ins for calls of units, cached by the shapes of their arguments and of the batch."""

    def __init__(self, units: Mapping[str, nn.Module], example: Batch) -> None:
        self._units, self._example = units, signature_of(list(example.values()))
        self._twins: dict[str, nn.Module] = {}
        self._known: dict[tuple[Any, ...], StandIn] = {}

    def stand_in(
        self, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, shapes: Any
    ) -> StandIn:
        """Return what the call would return for these arguments. `shapes` is the `signature_of` the batch."""
        signature = signature_of(leaves_of(opened(args, kwargs)))
        key = call.name, device, signature, shapes
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()  # Python numbers are part of the key, and may differ in every call.
            is_example = shapes == self._example and signature == call.signature
            outline = call.outline if is_example else self._find(call, *pytree.tree_flatten(opened(args, kwargs)))
            made = {leaf: each for leaf, each in outline.tensors.items() if leaf not in call.overwritten}
            # Placeholders are reused, so they must not be inference tensors, which autograd rejects.
            with torch.inference_mode(False):
                known = StandIn(outline, {leaf: each.placeholder(device) for leaf, each in made.items()})
            self._known[key] = known
        return known

    def _find(self, call: UnitCall, arguments: list[Any], tree: pytree.TreeSpec) -> Outline:
        given = on_meta(arguments)
        try:
            found = outline_of(call_on_meta(filling(self._twin(call.unit), call.filled), given, tree), given)
        except Exception as error:  # A module may raise anything on the meta device.
            return _by_likeness(call, arguments, error)
        assert len(found.leaves) == len(call.outline.leaves), f"{call.name} returns other things than on the example"
        leaves = [_updated(old, new) for old, new in zip(call.outline.leaves, found.leaves, strict=True)]
        return Outline.of(call.outline.tree, leaves)

    def _twin(self, unit: str) -> nn.Module:
        module = self._units[unit]
        if is_on_meta(module):
            return module
        if unit not in self._twins:
            self._twins[unit] = meta_twin(module)
        return self._twins[unit]

    def hooked(
        self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, tensors: Collection[Tensor]
    ) -> Any:
        """Call the unit's forward hooks with the stand-in for its output, as they may collect it.

        What they return is ignored: the stand-in already has the outline that the unit and its hooks returned on the
        stage that runs it. So is what they write into it: they get copies of its `tensors`, which were received or are
        placeholders. So are hooks that they register on it: its gradient goes to that stage, where the same hooks are
        called.
        """
        module = self._units[unit]
        hooks = list(forward_hooks(module))
        copied = {id(each): each.clone() for each in tensors} if hooks else {}
        seen = pytree.tree_map(lambda each: copied.get(id(each), each), returned) if hooks else returned
        for hook, with_kwargs in hooks:
            try:
                hook(module, args, kwargs, seen) if with_kwargs else hook(module, args, seen)
            except Exception as error:
                raise ShardwiseError(
                    f"a forward hook of {unit} fails on a stage that has not run it, at {line_of_error(error)}:"
                    f" {error}",
                    remedy="a hook that needs nothing but what it is given; or what it does in the forward of a unit",
                ) from error
        for each in copied.values():
            remove_hooks_but(each, ())
        return returned


def _updated(old: Any, new: Any) -> Any:
    """Return the old leaf with the new shape, or the new integer, which may be derived from a shape.

    Arguments passed through and dtypes under autocast are taken from the example, which is more reliable.
    """
    if isinstance(old, TensorOutline) and isinstance(new, TensorOutline):
        return TensorOutline(new.shape, old.dtype)
    return new if type(old) is int and type(new) is int else old


def _by_likeness(call: UnitCall, arguments: list[Any], error: Exception) -> Outline:
    """Infer shapes for a unit that fails on the meta device: an output shaped like an argument keeps that relation."""
    leaves: list[Any] = []
    for leaf in call.outline.leaves:
        if isinstance(leaf, TensorOutline):
            shapes = [each[0] if isinstance(each, tuple) else None for each in call.signature]
            if leaf.shape not in shapes:
                raise ShardwiseError(
                    f"the shape of what {call.name} returns cannot be foreseen for a new shape of its arguments"
                    f" (on the meta device it raised: {error})",
                    remedy="keep the batch's shapes as they were in the example",
                ) from error
            leaf = TensorOutline(tuple(arguments[shapes.index(torch.Size(leaf.shape))].shape), leaf.dtype)
        leaves.append(leaf)
    return Outline.of(call.outline.tree, leaves)
