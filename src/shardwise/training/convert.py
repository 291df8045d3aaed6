"""Conversion between our checkpoints, Hugging Face folders and folders of `torch.distributed.checkpoint`.

All go tensor by tensor, never with the whole model in memory. Hugging Face's format, with its names, is in the middle:

    ours  <-->  Hugging Face  <-->  torch.distributed.checkpoint
"""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.nets.hf import Checkpoint, save
from shardwise.nets.hf.entries import CONFIG
from shardwise.nets.hf.save import in_shards
from shardwise.output import refuse_link
from shardwise.training.checkpoint.index import SAVING, Entry, FileOutline, Index, write_index
from shardwise.training.checkpoint.parts import Part, whole_part
from shardwise.training.checkpoint.read import Reader
from shardwise.training.checkpoint.write import Mark, write_parts
from shardwise.training.convert_dcp import copy_beside, from_dcp, to_dcp
from shardwise.training.convert_own import own_to_theirs
from shardwise.training.kinds import BESIDE, DCP, KINDS, OURS, THEIRS, find_source
from shardwise.training.model import check_sayable, described, settings_from
from shardwise.working import working_at

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(
    source: Path,
    target: Path,
    *,
    to: str | None = None,
    config: Path | None = None,
    dtype: str | None = None,
    file_bytes: int = 10**9,
) -> tuple[str, int]:
    """Convert to a folder of the kind `to`. The default is Hugging Face's, or ours if the source is Hugging Face's.

    Files have at most `file_bytes`, or one tensor, which also bounds the memory used. `config` is the location of
    `config.json` if the source has none. Return the kind of the new folder, and the bytes of its tensor files.
    """
    with os_errors_as(f"{target} cannot be written", remedy="another place for it"):
        refuse_link(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ShardwiseError(f"{target} is not empty", remedy="a folder that is not there yet")
    source, kind = find_source(source)
    goal = to or (OURS if kind == THEIRS else THEIRS)
    if goal == kind:
        others = " or ".join(f"--to {each}" for each in KINDS if each != kind)
        raise ShardwiseError(f"{source} is a {kind} folder already", remedy=others)
    making = target.with_name(target.name + SAVING)
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        _convert(source, making, kind, goal, config, _DTYPES[dtype] if dtype else None, file_bytes)
        if target.exists():
            target.rmdir()
        making.rename(target)
    except OSError as error:
        raise ShardwiseError(f"{target} cannot be written: {error.strerror}", remedy="another place for it") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in target.iterdir() if path.suffix in (".safetensors", ".distcp"))
    return goal, num_bytes


def _convert(
    source: Path, target: Path, kind: str, goal: str, config: Path | None, dtype: torch.dtype | None, file_bytes: int
) -> None:
    if THEIRS not in (kind, goal):
        # The other two are converted through a temporary Hugging Face folder.
        with TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as name:
            between = Path(name) / THEIRS
            _convert(source, between, kind, THEIRS, config, dtype, file_bytes)
            _convert(between, target, THEIRS, goal, None, None, file_bytes)
    elif kind == DCP:
        from_dcp(source, target, config, dtype, file_bytes)
    elif goal == DCP:
        to_dcp(source, target, dtype)
    elif kind == THEIRS:
        _to_ours(source, target, dtype, file_bytes)
    else:
        _to_theirs(source, target, dtype, file_bytes)


def _to_ours(source: Path, target: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    entries: dict[str, Entry] = {}
    files: dict[str, FileOutline] = {}
    mark = Mark(secrets.token_hex(8), 0)
    with Checkpoint(source) as checkpoint:
        checkpoint.check()
        settings = checkpoint.settings
        for number, parts in enumerate(_files(checkpoint, dtype, file_bytes)):
            path = target / f"rank-{number:05}.safetensors"
            written, files[path.name] = write_parts(path, parts, mark)
            entries |= written
    (target / BESIDE).mkdir()
    copy_beside(source, target / BESIDE)
    extra = {"model": described(settings, str(source)), BESIDE: _digests(target / BESIDE)}
    write_index(target, Index(step=mark.step, entries=entries, extra=extra, files=files, run=mark.run))


def _files(checkpoint: Checkpoint, dtype: torch.dtype | None, file_bytes: int) -> Iterator[list[Part]]:
    """Yield the weights of one file at a time."""

    def parts() -> Iterator[tuple[Part, int]]:
        for number, name in enumerate(checkpoint.shapes):
            working_at("tensors written", number, len(checkpoint.shapes))
            weight = checkpoint.read(name)
            part = whole_part(name, weight if dtype is None else weight.to(dtype))
            yield part, part.numbers.nbytes

    return in_shards(parts(), file_bytes)


def _to_theirs(source: Path, target: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    with Reader(source) as reader:
        description = reader.index.extra.get("model", {})
        if description.get("hf") is not None:
            own_to_theirs(reader, description, target, dtype, file_bytes)
            return
        check_sayable(description, origin=source)
        settings = settings_from(description, origin=source)
        weights = _Weights(reader, dtype)
        save(weights, target, settings=settings, family=description["family"], shard_bytes=file_bytes)
        stored: torch.dtype = getattr(torch, reader.weights["embed.weight"].dtype)
        kept = reader.index.extra.get(BESIDE)
    # A fine-tuned model keeps its tokenizer, and the entries of its configuration that we do not use.
    begun = Path(description.get("folder", source / BESIDE))
    if "folder" not in description and kept is not None and _digests(begun) != kept:
        raise ShardwiseError(
            f"{begun} is damaged: its files are not those that were written",
            remedy=f"{source}, made again",
        )
    if (begun / CONFIG).is_file():
        copy_beside(begun, target, dtype or (stored if "folder" in description else None))


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a folder, by name."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in paths}


class _Weights(Mapping[str, Tensor]):
    """The weights of a checkpoint by name, each read on access."""

    def __init__(self, reader: Reader, dtype: torch.dtype | None) -> None:
        self._names = list(reader.weights)
        # All experts of a layer are one weight here, but are read one after the other: cache the last weight.
        self._read = lru_cache(1)(lambda name: reader.whole(name) if dtype is None else reader.whole(name).to(dtype))

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
