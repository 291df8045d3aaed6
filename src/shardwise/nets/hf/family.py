"""A family of models: how its `config.json` is read and written, and how its tensors are named."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.naming import Naming, llama_naming
from shardwise.nets.settings import Settings

_Kind = TypeVar("_Kind")


class AnotherKindError(Exception):
    """Settings that a family has no entries for at all."""


def of_kind(part: object, kind: type[_Kind]) -> _Kind:
    """Return a part of the settings if it has the type that a family needs; otherwise raise."""
    if not isinstance(part, kind):
        raise AnotherKindError
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. `write` raises `AnotherKindError` for settings of another kind; other losses show by reading back."""

    #: `model_type` and `architectures` of its `config.json`.
    name: str
    architecture: str
    read: Callable[[Entries], Settings]
    write: Callable[[Settings], dict[str, Any]]
    #: Maps the names of a folder's tensors to their naming; without names, returns the naming to write.
    naming: Callable[[Collection[str]], Naming] = llama_naming
    #: Tensors of some folders that are not needed.
    ignored: str = r"rotary_emb\.inv_freq$"
    #: Whether it has layers after the last that predict later tokens. transformers ignores them too.
    has_layers_beyond: bool = False

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return the `config.json` that expresses exactly these settings. Raise if the family has none."""
        try:
            config = self.write(settings)
        except AnotherKindError:
            raise ShardwiseError(f"{self.name} models have another kind of attention, experts or positions") from None
        again = self.read(Entries(config))
        lost = [
            f"{field.name}={getattr(settings, field.name)}"
            for field in fields(settings)
            if getattr(settings, field.name) != getattr(again, field.name)
        ]
        if lost:
            raise ShardwiseError(f"a config.json of {self.name} cannot say {', '.join(lost)}")
        return {"architectures": [self.architecture], "model_type": self.name, **config}

    def ignores(self, tensor: str, settings: Settings) -> bool:
        """Whether a tensor of a folder may be ignored: a copy, a table, or a layer for training only."""
        if tensor == "lm_head.weight" and settings.tied:
            return True
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", tensor)
        is_beyond = layer is not None and int(layer[1]) >= settings.num_layers
        return (is_beyond and self.has_layers_beyond) or re.search(self.ignored, tensor) is not None
