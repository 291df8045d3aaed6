"""The format: a folder for each checkpoint, with a safetensors file from each writing rank, and an index of all boxes.

    checkpoints/
        step-00000100/
            index.json               all tensors, their whole shapes, the file of each box, checksums
            rank-00000.safetensors   boxes, each under the name of its tensor
            rank-00000-2.safetensors second boxes of tensors of which the rank had several
            rank-00001.safetensors
        step-00000200.4f1c.saving/   incomplete; one left after a kill may be deleted

The folder is renamed to its final name when all is written. It contains nothing of the plan. Every byte has a checksum.
The index has those of the boxes, block by block, and of the file headers, and ends with a digest of itself. All files
of a checkpoint carry the mark of the run that wrote them.

Checkpoints of format 1 can still be read. They have one checksum for each box, and none for the index.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import replacing
from shardwise.training.checkpoint.blocks import BLOCK_BYTES
from shardwise.training.checkpoint.boxes import Box

FORMAT, OLD_FORMAT = "shardwise checkpoint 2", "shardwise checkpoint 1"
INDEX = "index.json"
SAVING = ".saving"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A box in a file, and the checksums of its blocks."""

    file: str
    key: str
    box: Box
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor: its whole shape, its type, and its boxes."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Stored, ...]


class FileOutline(NamedTuple):
    """The entry of a file in the index."""

    num_bytes: int
    header_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The index of a checkpoint. `extra` are other values needed to resume: descriptions, the loss scale and the like.

    `run` marks the run that wrote it. Format 1 has neither `run` nor `files`, and a box is one block.
    """

    step: int
    entries: Mapping[str, Entry]
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileOutline] = field(default_factory=dict)
    run: str = ""
    block_bytes: int | None = BLOCK_BYTES

    @property
    def is_old(self) -> bool:
        return self.block_bytes is None


def bytes_of(numbers: Tensor) -> Any:
    """Return the bytes of a CPU tensor, copied only if it is not contiguous."""
    flat = numbers.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08}"


def saved_steps(root: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, in order."""
    names = [_NAME.fullmatch(path.name) for path in root.glob("step-*")] if root.is_dir() else []
    return sorted(int(name[1]) for name in names if name is not None)


def find_last(root: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    steps = saved_steps(root)
    return folder_of(root, steps[-1]) if steps else None


def clean(root: Path) -> None:
    """Delete the incomplete checkpoints of killed runs. Call this only while no process writes."""
    for path in root.glob(f"step-*{SAVING}"):
        shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`. A folder is renamed first, so that a checkpoint is never partly deleted."""
    for step in saved_steps(root)[:-keep]:
        path = folder_of(root, step)
        going = path.with_name(path.name + SAVING)
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that ends with the digest of all before it. It appears under its name only when complete."""
    text = json.dumps(content).encode()[:-1]
    with replacing(path) as file:
        file.write(text + _ending(text))
        file.flush()
        os.fsync(file.fileno())


def check_digest(raw: bytes) -> None:
    """Raise a `ValueError` if the bytes do not end with the digest that `write_json` writes."""
    length = len(_ending(b""))
    if raw[-length:] != _ending(raw[:-length]):
        raise ValueError("its digest is not the one that was written")


def _ending(text: bytes) -> bytes:
    return f', "digest": "{blake2b(text, digest_size=16).hexdigest()}"}}'.encode()


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a checkpoint whose files are written."""
    content = {
        "format": FORMAT,
        "run": index.run,
        "step": index.step,
        "extra": index.extra,
        "block_bytes": index.block_bytes,
        "files": index.files,
        "entries": told(index.entries),
    }
    write_json(folder / INDEX, content)


def told(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return entries in JSON types."""
    return {
        name: {
            "shape": entry.shape,
            "dtype": entry.dtype,
            "boxes": [[each.file, each.key, each.box.start, each.box.size, each.checksums] for each in entry.boxes],
        }
        for name, entry in entries.items()
    }


def read_entries(content: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        name: Entry(
            shape=tuple(each["shape"]),
            dtype=each["dtype"],
            boxes=tuple(
                Stored(
                    file=file,
                    key=key,
                    box=Box(tuple(start), tuple(size)),
                    checksums=(checksums,) if isinstance(checksums, int) else tuple(checksums),
                )
                for file, key, start, size, checksums in each["boxes"]
            ),
        )
        for name, each in content.items()
    }


def read_files(content: Mapping[str, Any]) -> dict[str, FileOutline]:
    return {name: FileOutline(*each) for name, each in content.items()}


def without(folder: Path) -> str:
    """Return the remedy for a checkpoint that cannot be read."""
    return f"rm -r {folder}: the run goes on from the one before it"


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint. Raise if it is damaged."""
    path, like = folder / INDEX, "a folder like runs/NAME/checkpoints/step-00000100"
    try:
        with os_errors_as(f"{folder} is not a checkpoint: {path.name} cannot be read", remedy=like):
            raw = path.read_bytes()
        content = json.loads(raw)
        said = content.get("format") if isinstance(content, dict) else None
        if said not in (FORMAT, OLD_FORMAT):
            raise ShardwiseError(
                f"{folder} has the format {said!r}, and this Shardwise reads {FORMAT!r}",
                remedy="the version of Shardwise that wrote it",
            )
        if said == FORMAT:
            check_digest(raw)
        index = _read_old(content) if said == OLD_FORMAT else _read(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} at {error}"
        raise ShardwiseError(f"{path} is damaged: {why}", remedy=without(folder)) from None
    named = _NAME.fullmatch(folder.name)
    if named is not None and int(named[1]) != index.step:
        raise ShardwiseError(
            f"{folder} is not what it is called: {path.name} is of step {index.step}",
            remedy=f"mv {folder} {folder_of(folder.parent, index.step)}, if nothing else is wrong with it",
        )
    return index


def _read(content: Mapping[str, Any]) -> Index:
    return Index(
        step=content["step"],
        entries=read_entries(content["entries"]),
        extra=content["extra"],
        files=read_files(content["files"]),
        run=content["run"],
        block_bytes=content["block_bytes"],
    )


def _read_old(content: Mapping[str, Any]) -> Index:
    if set(content) != {"format", "step", "extra", "entries"}:
        raise ValueError(f"it has other keys than those of {OLD_FORMAT!r}")
    return Index(
        step=content["step"], entries=read_entries(content["entries"]), extra=content["extra"], block_bytes=None
    )
