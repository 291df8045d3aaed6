"""A family of models: how its `config.json` is read and written, and what its tensors are called."""

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
    """Settings of quite another kind than those of a family: it has no word for them."""


def of_kind(part: object, kind: type[_Kind]) -> _Kind:
    """A part of the settings, if it is of the kind that a family has."""
    if not isinstance(part, kind):
        raise AnotherKindError
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`write` raises `AnotherKindError` for such settings; what else it cannot say is found by reading it again."""

    #: `model_type` and `architectures` of its `config.json`.
    name: str
    architecture: str
    read: Callable[[Entries], Settings]
    write: Callable[[Settings], dict[str, Any]]
    #: From the names of a folder's tensors; without any, the naming to write.
    naming: Callable[[Collection[str]], Naming] = llama_naming
    #: Tensors that are in some folders, and that nobody needs.
    ignored: str = r"rotary_emb\.inv_freq$"
    #: Layers behind the last that predict tokens after the next. transformers leaves them alone too.
    has_layers_beyond: bool = False

    def config(self, settings: Settings) -> dict[str, Any]:
        """The `config.json` that says exactly these settings. Raises if the family has none."""
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
        """Whether a tensor of a folder is rightly left alone: a copy, a table, or layers that are for training only."""
        if tensor == "lm_head.weight" and settings.tied:
            return True
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", tensor)
        is_beyond = layer is not None and int(layer[1]) >= settings.num_layers
        return (is_beyond and self.has_layers_beyond) or re.search(self.ignored, tensor) is not None
