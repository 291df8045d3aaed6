"""Folders of Hugging Face to those of `torch.distributed.checkpoint`, and back: the same tensors under the same names.

A folder of torch does not say which model it is of. We write `config.json` and the tokenizer beside the tensors; of a
folder that others have written, the `config.json` is given. Its tensors may be within something (`{"model": ...}`), and
beside others: those that the model does not have, like an optimizer's, are left out.
"""

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf import Checkpoint
from shardwise.nets.hf.catalogue import family_of
from shardwise.nets.hf.entries import CONFIG, read_entries
from shardwise.nets.hf.files import INDEX, ONE_FILE, Files
from shardwise.nets.weights import shapes_of
from shardwise.training.checkpoint.torch_folder import Outline, TorchFolder, write_torch_folder

_MOST_NAMES = 3
_BESIDE = (".json", ".txt", ".model", ".jinja")


def to_dcp(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Make a folder of torch of one of Hugging Face."""
    files = Files(source)
    try:
        outlines: dict[str, Outline] = {name: (files.shape(name), dtype or files.dtype(name)) for name in files.names}

        def read(name: str) -> Tensor:
            whole = tuple(slice(None) for _ in outlines[name][0])
            return files.read(name, whole).to(outlines[name][1])

        write_torch_folder(target, outlines, read)
    finally:
        files.close()
    copy_beside(source, target, dtype)


def from_dcp(source: Path, target: Path, config: Path | None, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Make a folder of Hugging Face of one of torch."""
    folder, home = TorchFolder(source), _home_of(source, config)
    names = _find_names(folder.tensors, home, source)
    files = list(_files(folder, names, dtype, file_bytes))
    target.mkdir(parents=True, exist_ok=True)
    homes: dict[str, str] = {}
    total = 0
    for number, some in enumerate(files, start=1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: folder.read(names[name]) for name in some}
        tensors = tensors if dtype is None else {name: each.to(dtype) for name, each in tensors.items()}
        save_file(tensors, target / file, metadata={"format": "pt"})
        homes |= dict.fromkeys(some, file)
        total += sum(each.numel() * each.element_size() for each in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_beside(home, target, dtype)
    with Checkpoint(target) as made:
        made.check()


def copy_beside(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Configuration and tokenizer: all that is no weight. The configuration is told of another type of the weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _BESIDE and "index" not in path.name:
            shutil.copyfile(path, target / path.name)
    if dtype is not None and (target / CONFIG).is_file():
        config = json.loads((target / CONFIG).read_text(encoding="utf-8"))
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _home_of(source: Path, config: Path | None) -> Path:
    """The folder with the configuration."""
    home = source if config is None else config.parent if config.is_file() else config
    if not (home / CONFIG).is_file():
        raise ShardwiseError(
            f"{home} has no {CONFIG}, and {source} does not say which model it is of",
            remedy=f"--config FOLDER, one with the {CONFIG} of the model",
        )
    return home


def _find_names(there: Collection[str], home: Path, source: Path) -> dict[str, str]:
    """The model's tensors by the names that Hugging Face has for them, and what they are called in the folder."""
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
    shown = ", ".join(missing[:_MOST_NAMES])
    more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
    raise ShardwiseError(
        f"{source} lacks {shown}{more}, which a {family.name} model of {home / CONFIG} has",
        remedy=f"--config FOLDER, one with the {CONFIG} of this model; tensors are found by Hugging Face's names",
    )


def _files(
    folder: TorchFolder, names: dict[str, str], dtype: torch.dtype | None, file_bytes: int
) -> Iterator[list[str]]:
    """The tensors of each file, in order."""
    current: list[str] = []
    held = 0
    for name, called in names.items():
        shape, stored = folder.tensors[called]
        size = torch.Size(shape).numel() * (dtype or stored).itemsize
        if current and held + size > file_bytes:
            yield current
            current, held = [], 0
        current.append(name)
        held += size
    yield current
