"""Checkpoints of ours to folders of Hugging Face, and back: tensor by tensor, never the whole model at once."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf import Checkpoint, save
from shardwise.nets.hf.entries import CONFIG
from shardwise.training.checkpoint.boxes import whole_box
from shardwise.training.checkpoint.index import (
    FORMAT,
    INDEX,
    SAVING,
    Entry,
    find_last,
    told,
    write_json,
)
from shardwise.training.checkpoint.parts import Part
from shardwise.training.checkpoint.read import Reader
from shardwise.training.checkpoint.write import write_parts
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.model import described, settings_from

#: Beside our files: what else lay in the folder that they came from.
_BESIDE = "hf"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was made of what."""

    target: Path
    kind: str
    num_tensors: int
    num_bytes: int


def convert(source: Path, target: Path, *, dtype: str | None = None, file_bytes: int = 10**9) -> Converted:
    """Make a folder of the other kind. Files have at most `file_bytes`, or one tensor: so much is held at a time."""
    if target.exists() and any(target.iterdir()):
        raise ShardwiseError(f"{target} is not empty", remedy="a folder that is not there yet")
    if not source.exists():
        raise ShardwiseError(f"{source} is not there", remedy="a run, one of its checkpoints, or a Hugging Face folder")
    if (source / CHECKPOINTS).is_dir():
        last = find_last(source / CHECKPOINTS)
        if last is None:
            raise ShardwiseError(f"the run {source} has no checkpoint yet", remedy="a run that has saved one")
        source = last
    chosen = None if dtype is None else _DTYPES[dtype]
    if (source / INDEX).is_file():
        return _to_theirs(source, target, chosen, file_bytes)
    if (source / CONFIG).is_file():
        return _to_ours(source, target, chosen, file_bytes)
    raise ShardwiseError(
        f"{source} has neither {INDEX} nor {CONFIG}, so it is neither our checkpoint nor a Hugging Face folder",
        remedy="a run, one of its checkpoints, or a Hugging Face folder",
    )


def _to_ours(source: Path, target: Path, dtype: torch.dtype | None, file_bytes: int) -> Converted:
    making = target.with_name(target.name + SAVING)
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    entries: dict[str, Entry] = {}
    with Checkpoint(source) as checkpoint:
        checkpoint.check()
        settings = checkpoint.settings
        for number, parts in enumerate(_files(checkpoint, dtype, file_bytes)):
            entries |= write_parts(making / f"rank-{number:05}.safetensors", parts)
    _copy_rest(source, making / _BESIDE)
    write_json(
        making / INDEX,
        {
            "format": FORMAT,
            "step": 0,
            "extra": {"model": described(settings, str(source))},
            "entries": told(entries),
        },
    )
    if target.exists():
        target.rmdir()
    making.rename(target)
    return _converted(target, "shardwise", entries)


def _files(checkpoint: Checkpoint, dtype: torch.dtype | None, file_bytes: int) -> Iterator[list[Part]]:
    """The weights, as many at a time as go into one file."""
    parts: list[Part] = []
    held = 0
    for name, shape in checkpoint.shapes.items():
        weight = checkpoint.read(name)
        weight = weight if dtype is None else weight.to(dtype)
        size = weight.numel() * weight.element_size()
        if parts and held + size > file_bytes:
            yield parts
            parts, held = [], 0
        parts.append(Part(name, shape, whole_box(shape), weight))
        held += size
    yield parts


def _to_theirs(source: Path, target: Path, dtype: torch.dtype | None, file_bytes: int) -> Converted:
    with Reader(source) as reader:
        description = reader.index.extra.get("model", {})
        settings = settings_from(description, origin=source)
        save(
            _Weights(reader, dtype),
            target,
            settings=settings,
            family=description["family"],
            shard_bytes=file_bytes,
        )
        entries = reader.weights
    beside = source / _BESIDE
    for path in beside.iterdir() if beside.is_dir() else []:
        # Its own config says more than ours, but not another type of the weights.
        if path.name != CONFIG or dtype is None:
            shutil.copyfile(path, target / path.name)
    return _converted(target, "huggingface", entries)


class _Weights(Mapping[str, Tensor]):
    """The weights of a checkpoint by name, each read when it is asked for."""

    def __init__(self, reader: Reader, dtype: torch.dtype | None) -> None:
        self._reader, self._names, self._dtype = reader, list(reader.weights), dtype
        # Experts are asked for one after the other, and are one weight of ours.
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            weight = self._reader.whole(name)
            self._last = name, weight if self._dtype is None else weight.to(self._dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _copy_rest(source: Path, beside: Path) -> None:
    """Configuration and tokenizer: all that is no weight."""
    beside.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
            shutil.copyfile(path, beside / path.name)


def _converted(target: Path, kind: str, entries: Mapping[str, Entry]) -> Converted:
    sizes = [
        stored.box.num_numbers * getattr(torch, entry.dtype).itemsize
        for entry in entries.values()
        for stored in entry.boxes
    ]
    return Converted(target=target, kind=kind, num_tensors=len(entries), num_bytes=sum(sizes))
