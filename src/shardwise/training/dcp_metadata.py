"""Reading `.metadata` of `torch.distributed.checkpoint` without executing code from it.

It is a pickle, and a pickle may call any function by name. Here names are looked up in an allowlist: classes of torch's
metadata become inert records that only hold their state; any other name is refused. Torch's own objects are then built
from the records, with every field validated.
"""

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.errors import ShardwiseError

_HERE, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
#: The module of some of them in torch up to 2.2.
_BEFORE = "torch.distributed._shard.sharded_tensor.metadata"
#: The classes in `.metadata`, by module and name. Each becomes a record.
_CLASSES = {
    (_HERE, "Metadata"),
    (_HERE, "MetadataIndex"),
    (_HERE, "TensorStorageMetadata"),
    (_HERE, "BytesStorageMetadata"),
    (_HERE, "ChunkStorageMetadata"),
    (_HERE, "TensorProperties"),
    (_HERE, "StorageMeta"),
    (_HERE, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    (_FILES, "_StoragePrefix"),
    (_BEFORE, "TensorProperties"),
    (_BEFORE, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_REMEDY = "a folder that torch.distributed.checkpoint has completed"


class _Names(pickle.Unpickler):
    """Resolves the names of a pickle only from the allowlists here, and torch's dtypes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New classes for each pickle: changes that one makes to a class do not affect the next.
        self._records = {name: type(name[1], (_Record,), {}) for name in _CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        found = self._records.get((module, name)) or _VALUES.get((module, name))
        if found is not None:
            return found
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError(f"something kept elsewhere ({pid})")


class _RefusedError(Exception):
    """A name that is not allowed."""


class _Record:
    """The state that a pickle gives to an object: its fields, or another kind of state."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Ignore constructor arguments: layouts and memory formats."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Return a field of a dataclass, or None."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def _member(kind: Any, name: Any) -> _Record:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle by name."""
    if isinstance(kind, type) and issubclass(kind, _Record) and isinstance(name, str):
        return kind(name)
    raise _RefusedError("builtins.getattr")


#: Constructors of plain values.
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member,
}


def read_metadata(folder: Path, name: str) -> Metadata:
    """Return the metadata of a folder: its tensors, and the locations of their pieces."""
    path = folder / name
    try:
        with path.open("rb") as file:
            found = _Names(file).load()
        return _metadata_of(found)
    except _RefusedError as error:
        raise ShardwiseError(
            f"{path} names {error}, which is not part of torch's metadata; the file is a pickle, and could run it",
            remedy=_REMEDY,
        ) from None
    except Exception as error:  # A pickle that is damaged may raise anything.
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ShardwiseError(f"{path} cannot be read: {why}", remedy=_REMEDY) from None


def _metadata_of(record: Any) -> Metadata:
    _check(record, "Metadata")
    tensors, places = record.get("state_dict_metadata"), record.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise ValueError("it has no tensors")
    # An entry that is not a tensor, such as a step count, is a pickle of its own and ignored.
    known = {str(name): _tensor_of(each) for name, each in tensors.items() if _is(each, "TensorStorageMetadata")}
    indices = ((_index_of(key), each) for key, each in places.items())
    stored = {index: _place_of(each) for index, each in indices if index.fqn in known}
    return Metadata(state_dict_metadata=dict(known), storage_data=stored)


def _tensor_of(record: _Record) -> TensorStorageMetadata:
    properties, chunks = record.get("properties"), record.get("chunks")
    _check(properties, "TensorProperties")
    # The state is a tuple that begins with the dtype. Older versions have fields.
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        raise ValueError("a tensor has no type or no pieces")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size_of(record.get("size")),
        chunks=[_chunk_of(e) for e in chunks],
    )


def _chunk_of(record: Any) -> ChunkStorageMetadata:
    _check(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size_of(record.get("offsets")), sizes=_size_of(record.get("sizes")))


def _index_of(record: Any) -> MetadataIndex:
    _check(record, "MetadataIndex")
    offset, index = record.get("offset"), record.get("index")
    return MetadataIndex(
        str(record.get("fqn")), None if offset is None else _size_of(offset), None if index is None else int(index)
    )


class _Place(NamedTuple):
    """The location of a piece, with the attributes that torch's reader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _place_of(record: Any) -> _Place:
    """Return the location of a piece. It must be within the folder."""
    _check(record, "_StorageInfo")
    path = str(record.get("relative_path"))
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path} is not in the folder")
    transforms = tuple(map(str, record.get("transform_descriptors") or ()))
    return _Place(path, int(record.get("offset")), int(record.get("length")), transforms)


def _size_of(numbers: Any) -> torch.Size:
    return torch.Size([int(each) for each in numbers])


def _is(record: Any, name: str) -> bool:
    return isinstance(record, _Record) and type(record).__name__ == name


def _check(record: Any, name: str) -> None:
    if not _is(record, name):
        raise ValueError(f"a {type(record).__name__}, where a {name} should be")
