"""Conversion between Hugging Face folders and `torch.distributed.checkpoint`: the same tensors under the same names.

A DCP folder does not name its model. We write `config.json` and the tokenizer beside the tensors; for folders of other
writers, the user gives `config.json`. The tensors may be nested (`{"model": ...}`). Tensors that the model does not
have, such as optimizer state, are left out.

`.metadata` lists the tensors and the locations of their pieces; `__0_0.distcp` and so on hold the pieces. Planners and
file formats are torch's own. Our part is that at most one tensor is in memory at a time.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardwise.errors import ShardwiseError, some
from shardwise.nets.hf import Checkpoint
from shardwise.nets.hf.catalogue import family_of
from shardwise.nets.hf.entries import CONFIG, read_entries
from shardwise.nets.hf.files import Files
from shardwise.nets.hf.save import write_shards
from shardwise.nets.weights import shapes_of
from shardwise.training.dcp_metadata import read_metadata
from shardwise.training.kinds import METADATA
from shardwise.working import working_at

_BESIDE = (".json", ".txt", ".model", ".jinja")

#: The shape and type of a tensor.
Outline = tuple[tuple[int, ...], torch.dtype]


class TorchFolder:
    """An open DCP folder. `tensors` are its tensors. Other entries, such as a step count, are ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, FileSystemReader(folder)
        self._metadata = read_metadata(folder, METADATA)
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors: dict[str, Outline] = {
            name: (tuple(each.size), each.properties.dtype)
            for name, each in self._metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from its pieces."""
        shape, dtype = self.tensors[name]
        target = torch.empty(shape, dtype=dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: target}, self._metadata, True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # For truncated pieces torch raises various exceptions.
            raise ShardwiseError(
                f"{name} cannot be read from {self.folder}: {type(error).__name__}: {error}",
                remedy="a folder that torch.distributed.checkpoint has completed",
            ) from None
        return target


class _OneByOne(DefaultSavePlanner):
    """Plans with meta tensors, and reads each tensor when it is written."""

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


def to_dcp(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Convert a Hugging Face folder to a DCP folder."""
    files = Files(source)
    try:
        outlines: dict[str, Outline] = {name: (files.shape(name), dtype or files.dtype(name)) for name in files.names}

        waiting = dict.fromkeys(outlines)

        def read(name: str) -> Tensor:
            waiting.pop(name, None)
            working_at("tensors written", len(outlines) - len(waiting), len(outlines))
            whole = tuple(slice(None) for _ in outlines[name][0])
            return files.read(name, whole).to(outlines[name][1])

        write_torch_folder(target, outlines, read)
    finally:
        files.close()
    copy_beside(source, target, dtype)


def from_dcp(source: Path, target: Path, config: Path | None, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Convert a DCP folder to a Hugging Face folder."""
    folder, home = TorchFolder(source), _home_of(source, config)
    names = _find_names(folder.tensors, home, source)
    outlines = {name: folder.tensors[called] for name, called in names.items()}
    sizes = {name: torch.Size(shape).numel() * (dtype or stored).itemsize for name, (shape, stored) in outlines.items()}
    target.mkdir(parents=True, exist_ok=True)
    write_shards(target, sizes, lambda name: folder.read(names[name]).to(dtype or outlines[name][1]), file_bytes)
    copy_beside(home, target, dtype)
    with Checkpoint(target) as made:
        made.check()


def copy_beside(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy configuration and tokenizer: all files but weights. `dtype` replaces that of the configuration."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _BESIDE and "index" not in path.name:
            shutil.copyfile(path, target / path.name)
    if dtype is not None and (target / CONFIG).is_file():
        config = json.loads((target / CONFIG).read_text(encoding="utf-8"))
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _home_of(source: Path, config: Path | None) -> Path:
    """Return the folder with the configuration."""
    home = source if config is None else config.parent if config.is_file() else config
    if not (home / CONFIG).is_file():
        raise ShardwiseError(
            f"{home} has no {CONFIG}, and {source} does not say which model it is of",
            remedy=f"--config FOLDER, one with the {CONFIG} of the model",
        )
    return home


def _find_names(there: Collection[str], home: Path, source: Path) -> dict[str, str]:
    """Map the Hugging Face names of the model's tensors to their names in the folder."""
    entries = read_entries(home)
    family = family_of(entries)
    shapes = shapes_of(family.read(entries))
    (first,) = family.naming(()).pieces("embed.weight", shapes["embed.weight"])
    around = sorted({name.removesuffix(first.tensor) for name in there if name.endswith(first.tensor)}, key=len)
    missing = [first.tensor]
    for prefix in around:
        within = [name.removeprefix(prefix) for name in there if name.startswith(prefix)]
        naming = family.naming(within)
        wanted = {piece.tensor: None for name, shape in shapes.items() for piece in naming.pieces(name, shape)}
        missing = [name for name in wanted if name not in set(within)]
        if not missing:
            return {name: prefix + name for name in wanted}
    raise ShardwiseError(
        f"{source} lacks {some(missing)}, which a {family.name} model of {home / CONFIG} has",
        remedy=f"--config FOLDER, one with the {CONFIG} of this model; tensors are found by Hugging Face's names",
    )
