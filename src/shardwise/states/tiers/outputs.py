"""The tensors in what a module returns: also those in dataclasses, which torch does not look into by itself."""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from shardwise.stages.split.outline import leaves_of
from shardwise.torch_private import pytree


def open_dataclasses(given: Any) -> None:
    """Have torch look into dataclasses with tensors in them, as it looks into tuples: it knows those it was told of."""
    for each in leaves_of(given):
        if is_dataclass(each) and any(isinstance(getattr(each, field.name), Tensor) for field in fields(each)):
            pytree.register_dataclass(type(each))


def tensors_in(given: Any) -> list[Tensor]:
    """All tensors, in order."""
    open_dataclasses(given)
    return [each for each in leaves_of(given) if isinstance(each, Tensor)]
