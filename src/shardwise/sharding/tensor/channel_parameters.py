"""Channel-group analysis: parameters between layers, and which of their numbers meets which channel or head.

    hidden = up(x) * self.scale            scale[i] meets channel i, and goes where channel i goes
    scores = q @ k.mT * self.temperature   temperature[h] meets all that head h has become

A parameter whose every number meets channels of all ranks (a scale of one head's channels, used by all heads) has
nothing to be cut by.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.sharding.tensor.channel_labels import MOVES, Labels, distinct, moved
from shardwise.torch_private import pytree, schema_of

#: What has more is a matrix, and has no number for each channel.
_MOST_NUMBERS = 2**18


class ParameterChannels:
    """Follows the numbers of parameters through a run, up to where they meet labelled values."""

    def __init__(self, module: nn.Module) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Of each parameter, its numbers (by their places in it) and the labels that they met, pair by pair.
        self.met: dict[str, list[tuple[Labels, Labels]]] = {}
        self._places = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            self.shapes[name] = tuple(parameter.shape)
            if parameter.numel() <= _MOST_NUMBERS:
                self._places[parameter] = name, torch.arange(parameter.numel()).view(parameter.shape)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        """An operation without labels: if it moves or casts the numbers of one parameter, they are followed."""
        known = self._find(args[0]) if args else None
        if known is None:
            return
        name, places = known
        operation = schema_of(func).name.removeprefix("aten::")
        others = [each for each in pytree.tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor)]
        if operation in MOVES and not others:
            made = moved(func, operation, (places, *args[1:]), kwargs, returned)
        elif isinstance(returned, Tensor) and returned.shape == places.shape and not others:
            made = [places]
        else:
            return
        tensors = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
        for tensor, each in zip(tensors, made, strict=True):
            self._places[tensor] = name, each

    def meet(self, args: tuple[Any, ...], labels: Tensor) -> None:
        """An operation of number by number, whose result has these labels."""
        for each in args:
            known = self._find(each)
            if known is not None:
                name, places = known
                here, met = distinct([places.expand(labels.shape), labels])
                self.met.setdefault(name, []).append((here.reshape(-1).numpy(), met.reshape(-1).numpy()))

    def _find(self, each: Any) -> tuple[str, Tensor] | None:
        return self._places.get(each) if isinstance(each, Tensor) else None  # type: ignore[no-untyped-call]
