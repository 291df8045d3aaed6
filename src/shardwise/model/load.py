"""A model from what a user has: a name, a configuration, or a module."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import find_name, get_model
from shardwise.model.config import read_config
from shardwise.model.model import Model

if TYPE_CHECKING:
    from torch import nn


def load_model(source: "Model | str | Path | Mapping[str, Any] | nn.Module", *, batch: Any = None) -> Model:
    """Return the model that `source` is, names or describes.

    A string is a name in the catalogue, or the path of a `config.json` or its folder. A module is traced with `batch`.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, (Path, Mapping)):
        return read_config(source)
    if isinstance(source, str):
        is_path = find_name(source) is None and (source.endswith(".json") or Path(source).is_dir())
        return read_config(Path(source)) if is_path else get_model(source)
    if batch is None:
        raise ShardwiseError(
            f"what a {type(source).__name__} computes is seen by running it once, and no example batch was given",
            remedy='batch={"input_ids": torch.zeros(1, 4096, dtype=torch.long)}',
        )
    from shardwise.model.trace import trace_model  # Loads torch.

    return trace_model(source, batch)
