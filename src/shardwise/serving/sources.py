"""Read the model that the user names (a folder, a run, a file, a name of the catalogue) into a transformer of ours."""

from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError, unknown
from shardwise.model.catalogue import CATALOGUE, find_name
from shardwise.nets.hf import Checkpoint, load_model
from shardwise.nets.hf.catalogue import FAMILIES
from shardwise.nets.hf.entries import CONFIG, Entries, read_table
from shardwise.nets.initialise import initialise
from shardwise.nets.moe import MoE
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving.assemble import Identity
from shardwise.serving.identify import identify
from shardwise.serving.runner import for_serving
from shardwise.training.kinds import THEIRS, find_source

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_source(
    source: str, *, random_weights: bool, dtype: torch.dtype | None, device: torch.device
) -> tuple[Transformer, Identity]:
    """Read the model with its weights onto a device, and its identity."""
    path = Path(source)
    identity = identify(source, random_weights=random_weights)  # First: what it refuses needs no weights.
    if random_weights:
        model = _random(source, dtype, device)
    elif path.is_file():
        from shardwise.serving.gguf_file import read_gguf

        model = read_gguf(path, dtype, device)
    else:
        model = _folder(path, dtype, device)
    settings = for_serving(model.settings)
    model.settings = settings
    for each in model.modules():
        if isinstance(each, MoE) and settings.mixture is not None:
            each.mixture = settings.mixture
    return model.eval().requires_grad_(False), identity


def describe_source(
    source: str, *, random_weights: bool, dtype: torch.dtype | None
) -> tuple[Settings, torch.dtype, Identity]:
    """Return a model's shape, the dtype of its weights and its identity. Reads weights only if nothing else tells."""
    path = Path(source)
    if random_weights:
        return for_serving(_random_settings(source)), dtype or torch.float32, identify(source, random_weights=True)
    if path.is_dir() and find_source(path)[1] == THEIRS:
        with Checkpoint(path) as checkpoint:
            settings, found = checkpoint.settings, checkpoint.find_dtype()
        return for_serving(settings), dtype or found or torch.float32, identify(source, random_weights=False)
    model, identity = read_source(source, random_weights=False, dtype=dtype, device=torch.device("cpu"))
    return model.settings, model.embed.weight.dtype, identity


def find_shape(
    source: str, *, random_weights: bool, dtype: torch.dtype | None, device: torch.device
) -> tuple[Settings, torch.dtype] | None:
    """Return a model's shape and the dtype of its weights on a device; None if that needs reading weights."""
    path = Path(source)
    if random_weights:
        dtype = dtype or _random_type(device)
    elif not path.is_dir() or find_source(path)[1] != THEIRS:
        return None
    return describe_source(source, random_weights=random_weights, dtype=dtype)[:2]


def _random_settings(source: str) -> Settings:
    config = _config_of(source)
    if config.get("model_type") not in FAMILIES:
        raise ShardwiseError(
            f"{source} is of the family {config.get('model_type')}, for which this engine has no modules",
            remedy=f"a model of {', '.join(FAMILIES)}",
        )
    return FAMILIES[config["model_type"]].read(Entries(config, source))


def _config_of(source: str) -> dict[str, Any]:
    """Return the configuration of a folder, of a `config.json`, or of a name of the catalogue."""
    path = Path(source)
    path = path / CONFIG if path.is_dir() else path
    if path.is_file():
        return read_table(path)
    known = find_name(source)
    if known is None:
        near = unknown("model", source, CATALOGUE).remedy
        raise ShardwiseError(
            f"{source} is not a folder with a {CONFIG}, a {CONFIG} or a name of the catalogue, which has"
            f" {len(CATALOGUE)}",
            remedy=near or f"qwen3-0.6b, or the folder of a {CONFIG}",
        )
    return dict(CATALOGUE[known])


def _random_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _random(source: str, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    with torch.device("meta"):
        model = Transformer(_random_settings(source))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or _random_type(device))
    initialise(model, 0, device=device, drawn_there=device.type == "cuda")
    return model


def _folder(path: Path, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    folder, kind = find_source(path)
    if kind == THEIRS:
        return load_model(folder, dtype=dtype, device=device)
    from shardwise.training.sample import load_transformer  # Loads what training needs, half as much as torch.

    model = load_transformer(folder).to(device)
    return model if dtype is None else model.to(dtype)
