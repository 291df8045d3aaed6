"""Folders of `torch.distributed.checkpoint`, as `dcp.save` writes them, read and written tensor by tensor.

`.metadata` says which tensors there are and where their pieces lie; `__0_0.distcp` and the like hold them. The planners
and file formats are torch's own; what is ours is that no more than one tensor is ever in memory.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardwise.errors import ShardwiseError

METADATA = ".metadata"

#: The shape and type of a tensor.
Outline = tuple[tuple[int, ...], torch.dtype]


class TorchFolder:
    """One that is open. `tensors` are what is in it; what is no tensor, like a count of steps, is left alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
            known = self._metadata.state_dict_metadata
        except Exception as error:  # It is a pickle: one that is damaged may raise anything.
            raise ShardwiseError(
                f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}",
                remedy="a folder that torch.distributed.checkpoint has completed",
            ) from None
        self.tensors: dict[str, Outline] = {
            name: (tuple(each.size), each.properties.dtype)
            for name, each in known.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor, put together from its pieces."""
        shape, dtype = self.tensors[name]
        target = torch.empty(shape, dtype=dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: target}, self._metadata, True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # Of pieces that are cut short torch raises one thing or another.
            raise ShardwiseError(
                f"{name} cannot be read from {self.folder}: {type(error).__name__}: {error}",
                remedy="a folder that torch.distributed.checkpoint has completed",
            ) from None
        return target


class _OneByOne(DefaultSavePlanner):
    """Plans with outlines, and asks for each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def write_torch_folder(folder: Path, tensors: Mapping[str, Outline], read: Callable[[str], Tensor]) -> None:
    """Write a folder that `dcp.load` reads: the steps of `dcp.save`, on one process."""
    planner, writer = _OneByOne(read), FileSystemWriter(folder)
    outlines = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
    planner.set_up_planner(outlines, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])
