"""Save a model to a folder that transformers can read: safetensors of bounded size, an index, and `config.json`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.hf.entries import CONFIG
from shardwise.nets.hf.files import INDEX, ONE_FILE
from shardwise.nets.hf.pieces import Piece
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import shapes_of, weights_of
from shardwise.output import write_whole
from shardwise.working import working_at

Item = TypeVar("Item")

#: A tensor of a file: the weights of ours that it consists of, and the place of each in it.
_Recipe = list[tuple[str, Piece]]


def save(
    model: Transformer | Mapping[str, Tensor],
    folder: Path | str,
    *,
    settings: Settings | None = None,
    family: str | None = None,
    shard_bytes: int = 5 * 10**9,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model, or its weights by name with its `settings`, to a folder without one.

    `family` is the `model_type` to write; by default the first that can express all of the settings. No file is larger
    than `shard_bytes`, unless a single tensor is. Tensors of only one file are assembled at a time, and weights by name
    are read when they are needed. `extra` are further entries of `config.json`: token ids, for example.
    """
    folder = Path(folder)
    settings = model.settings if isinstance(model, Transformer) else settings
    assert settings is not None, "weights by name are saved with their settings"
    weights: Mapping[str, Tensor] = weights_of(model) if isinstance(model, Transformer) else model
    names = [name for name in weights if not (settings.tied and name == "head.weight")]
    shapes = _check(weights, names, settings)
    chosen, config = config_for(settings, family)
    if any(folder.glob("*.safetensors")):
        raise ShardwiseError(f"{folder} already has safetensors in it", remedy="an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    recipes: dict[str, _Recipe] = {}
    for name in names:
        for piece in chosen.naming(()).pieces(name, shapes[name]):
            recipes.setdefault(piece.tensor, []).append((name, piece))
    sizes = {
        tensor: sum(torch.Size(piece.size).numel() * weights[name].element_size() for name, piece in recipe)
        for tensor, recipe in recipes.items()
    }
    write_shards(folder, sizes, lambda tensor: _put_together(weights, recipes[tensor]), shard_bytes)
    config["torch_dtype"] = str(weights["embed.weight"].dtype).removeprefix("torch.")
    _write_json(folder / CONFIG, {**config, **(extra or {})})


def _check(weights: Mapping[str, Tensor], names: list[str], settings: Settings) -> dict[str, tuple[int, ...]]:
    """Refuse weights that do not match the settings. Return their shapes."""
    shapes = shapes_of(settings)
    missing = [name for name in shapes if name not in weights or weights[name].is_meta]
    if missing:
        raise ShardwiseError(
            f"{len(missing)} of {len(shapes)} weights are not here, {missing[0]} among them",
            remedy="gather the weights of all ranks, then save",
        )
    for name in names:
        weight = weights[name]
        if name not in shapes or tuple(weight.shape) != shapes[name]:
            whole = f"{list(shapes[name])} by the settings" if name in shapes else "no weight by the settings"
            raise ShardwiseError(
                f"{name} is {list(weight.shape)} here, and {whole}",
                remedy="whole weights, and the settings they are of",
            )
    return shapes


def write_shards(folder: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], shard_bytes: int) -> None:
    """Write tensors of these sizes to safetensors of at most `shard_bytes`, with an index if there are several
    files."""
    shards = list(in_shards(sizes.items(), shard_bytes))
    homes: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, start=1):
        file = ONE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        made: dict[str, Tensor] = {}
        for tensor in tensors:
            working_at("tensors written", len(homes) + len(made), len(sizes))
            made[tensor] = make(tensor)
        save_file(made, folder / file, metadata={"format": "pt"})
        total += sum(each.numel() * each.element_size() for each in made.values())
        homes |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": homes})


def in_shards(sized: Iterable[tuple[Item, int]], shard_bytes: int) -> Iterator[list[Item]]:
    """Yield items in order, in groups that fit into one file, each with at least one item."""
    current: list[Item] = []
    held = 0
    for item, size in sized:
        if current and held + size > shard_bytes:
            yield current
            current, held = [], 0
        current.append(item)
        held += size
    yield current


def _put_together(weights: Mapping[str, Tensor], recipe: _Recipe) -> Tensor:
    """Return one tensor as it is in a file; a copy, unless it is one of our weights unchanged."""
    name, piece = recipe[0]
    if len(recipe) == 1:
        made = piece.to_theirs(weights[name].detach()).cpu().contiguous()
        is_alone = made.untyped_storage().nbytes() == made.numel() * made.element_size()
        return made if is_alone else made.clone()
    shape = [max(ends) for ends in zip(*(each.end_there for _, each in recipe), strict=True)]
    made = torch.empty(shape, dtype=weights[name].dtype)
    for name, piece in recipe:
        box = tuple(slice(start, end) for start, end in zip(piece.offset, piece.end_there, strict=True))
        made[box].copy_(piece.to_theirs(weights[name].detach()))
    return made


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
