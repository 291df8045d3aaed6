"""`.metadata` of `torch.distributed.checkpoint`, read without running anything that it says.

It is a pickle, and a pickle may name any function to be called. Here names are looked up in a list: those of torch's
own metadata become records that hold what they were given and do nothing; any other name is refused. What torch is
then handed is made anew from the records, each field looked at.
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
#: What torch up to 2.2 called some of them.
_BEFORE = "torch.distributed._shard.sharded_tensor.metadata"
#: The classes of torch that `.metadata` is made of, by where a pickle finds them. Each becomes a record.
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
    """Finds the names of a pickle in the lists above, and nowhere else."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Made for each pickle: what one of them might do to a class is not seen by the next.
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
    """A name that is in neither list."""


class _Record:
    """What a pickle has given to an object of a class: its fields, or a state of another kind."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        """What it is called with is not wanted: a layout, how memory lies."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """A field of a dataclass; None where it has none."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def _member(kind: Any, name: Any) -> _Record:
    """One of an enumeration, which Python 3.11.0 to 3.11.3 write down by its name."""
    if isinstance(kind, type) and issubclass(kind, _Record) and isinstance(name, str):
        return kind(name)
    raise _RefusedError("builtins.getattr")


#: Plain values, made by what makes such values here.
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member,
}


def read_metadata(folder: Path, name: str) -> Metadata:
    """The metadata of a folder: which tensors there are, and where their pieces lie."""
    path = folder / name
    try:
        with path.open("rb") as file:
            found = _Names(file).load()
        return _metadata_of(found)
    except _RefusedError as error:
        raise ShardwiseError(
            f"{path} names {error}, which is nothing of torch's metadata; it is a pickle, and might run that",
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
    # What is no tensor, like a count of steps, is a pickle of its own and left alone.
    known = {str(name): _tensor_of(each) for name, each in tensors.items() if _is(each, "TensorStorageMetadata")}
    indices = ((_index_of(key), each) for key, each in places.items())
    stored = {index: _place_of(each) for index, each in indices if index.fqn in known}
    return Metadata(state_dict_metadata=dict(known), storage_data=stored)


def _tensor_of(record: _Record) -> TensorStorageMetadata:
    properties, chunks = record.get("properties"), record.get("chunks")
    _check(properties, "TensorProperties")
    # Its state is a tuple, of which the type is the first; old ones have the fields.
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
    """Where a piece lies, as torch's reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


def _place_of(record: Any) -> _Place:
    """Where a piece lies: in a file of the folder, and in none outside of it."""
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
