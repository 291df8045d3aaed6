"""The format: a folder for each checkpoint, a safetensors file of each rank that wrote, and an index of all boxes.

    checkpoints/
        step-00000100/
            index.json               which tensors there are, whole shapes, and in which file each box lies
            rank-00000.safetensors   boxes, each under the name of its tensor
            rank-00000-2.safetensors second boxes of tensors of which the rank had several
            rank-00001.safetensors
        step-00000200.saving/        not complete yet; whoever finds one after a kill may delete it

The folder gets its name when all is written. Nothing in it says under which plan it was made.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.training.checkpoint.boxes import Box

FORMAT = "shardwise checkpoint 1"
INDEX = "index.json"
SAVING = ".saving"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A box in a file."""

    file: str
    key: str
    box: Box
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor: its whole shape, its type, and its boxes."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All that a checkpoint says of itself. `extra` is what the run wants to know again: data position and the like."""

    step: int
    entries: Mapping[str, Entry]
    extra: Mapping[str, Any] = field(default_factory=dict)


def checksum_of(numbers: Tensor) -> int:
    """CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(bytes_of(numbers))


def bytes_of(numbers: Tensor) -> Any:
    """Those of a tensor on the CPU; copied only if it has gaps."""
    flat = numbers.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08}"


def saved_steps(root: Path) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    names = [_NAME.fullmatch(path.name) for path in root.glob("step-*")] if root.is_dir() else []
    return sorted(int(name[1]) for name in names if name is not None)


def find_last(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    steps = saved_steps(root)
    return folder_of(root, steps[-1]) if steps else None


def clean(root: Path) -> None:
    """Delete what was being written when a run was killed. Only when nobody writes."""
    for path in root.glob(f"step-*{SAVING}"):
        shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest. A folder loses its name first, so that none is ever half there."""
    for step in saved_steps(root)[:-keep]:
        path = folder_of(root, step)
        going = path.with_name(path.name + SAVING)
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file beside and rename it, so that whoever sees it sees all of it."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def told(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Entries in JSON's types."""
    return {
        name: {
            "shape": entry.shape,
            "dtype": entry.dtype,
            "boxes": [[each.file, each.key, each.box.start, each.box.size, each.checksum] for each in entry.boxes],
        }
        for name, entry in entries.items()
    }


def read_entries(content: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        name: Entry(
            shape=tuple(each["shape"]),
            dtype=each["dtype"],
            boxes=tuple(
                Stored(file=file, key=key, box=Box(tuple(start), tuple(size)), checksum=checksum)
                for file, key, start, size, checksum in each["boxes"]
            ),
        )
        for name, each in content.items()
    }


def without(folder: Path) -> str:
    """What to type against a checkpoint that cannot be read."""
    return f"rm -r {folder}: the run goes on from the one before it"


def read_index(folder: Path) -> Index:
    """The index of a checkpoint."""
    path, like = folder / INDEX, "a folder like runs/NAME/checkpoints/step-00000100"
    try:
        with os_errors_as(f"{folder} is no checkpoint: {path.name} cannot be read", remedy=like):
            content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardwiseError(f"{path} is damaged: {error}", remedy=without(folder)) from None
    said = content.get("format") if isinstance(content, dict) else None
    if said != FORMAT:
        raise ShardwiseError(
            f"{folder} has the format {said!r}, and this Shardwise reads {FORMAT!r}",
            remedy="the version of Shardwise that wrote it",
        )
    try:
        return Index(step=content["step"], entries=read_entries(content["entries"]), extra=content["extra"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShardwiseError(f"{path} is damaged: {type(error).__name__} at {error}", remedy=without(folder)) from None
