"""A cut module run once without numbers: a module that counts on all of its channels says so before it is trained."""

from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.sharding.tensor.columns import ColumnParallelLinear
from shardwise.sharding.tensor.rows import RowParallelLinear
from shardwise.stages.split.meta import Guesses, meta_twin


def try_once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a copy of a cut module, with arguments on the meta device. Nothing is sent."""
    twin, inside = meta_twin(module), _Inside()
    for name, each in twin.named_modules():
        each.register_forward_pre_hook(partial(inside.enter, name))
        each.register_forward_hook(inside.leave)
    try:
        with torch.no_grad(), Guesses():  # type: ignore[no-untyped-call]
            twin(*args, **kwargs)
    except Exception as error:
        holder = inside.find_holder(module)
        layers = ".".join("*" if part.isdecimal() else part for part in holder.split("."))
        raise ShardwiseError(
            f"{holder or type(module).__name__} cannot do with a part of its channels: {error}",
            remedy=f'tensor={{"{layers}": "whole"}}, or tp=1' if holder else "tp=1",
        ) from error


class _Inside:
    """The modules that are running, outermost first."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def enter(self, name: str, *_: Any) -> None:
        self._names.append(name)

    def leave(self, *_: Any) -> None:
        self._names.pop()

    def find_holder(self, module: nn.Module) -> str:
        """The innermost that has cut layers; "" if none has."""
        for name in reversed(self._names):
            found = module.get_submodule(name)
            if any(isinstance(each, (ColumnParallelLinear, RowParallelLinear)) for each in found.children()):
                return name
        return ""
