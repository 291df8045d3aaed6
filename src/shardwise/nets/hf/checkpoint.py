"""An open Hugging Face folder: its settings, and any part of any weight, by our names."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, some, unknown
from shardwise.nets.hf.catalogue import family_of
from shardwise.nets.hf.entries import read_entries
from shardwise.nets.hf.files import Files
from shardwise.nets.hf.pieces import Region
from shardwise.nets.weights import shapes_of

_HEAD, _ADAPTER = "lm_head.weight", "adapter_model.safetensors"


class Checkpoint:
    """Use it in a `with` statement, or close it. `bytes_read` counts the bytes read so far."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if (self.folder / _ADAPTER).is_file():
            raise ShardwiseError(
                f"{folder} has an adapter, {_ADAPTER}, and the weights beside it would be read without it",
                remedy="merge_and_unload() of peft, then save_pretrained() to another folder",
            )
        self._entries = read_entries(self.folder)
        self._family = family_of(self._entries)
        self.settings = self._family.read(self._entries)
        self._files = Files(self.folder)
        naming = self._family.naming(self._files.names)
        if self.settings.tied and not self._files.are_equal(naming.translate("embed.weight"), _HEAD):
            # As in transformers: what the files have counts more than what config.json says of it.
            self.settings = replace(self.settings, tied=False)
        #: The whole shapes, by our names.
        self.shapes = shapes_of(self.settings)
        self._pieces = {name: naming.pieces(name, shape) for name, shape in self.shapes.items()}
        self._theirs: dict[str, tuple[int, ...]] = {}
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            before = self._theirs.get(piece.tensor, piece.end_there)
            self._theirs[piece.tensor] = tuple(map(max, before, piece.end_there))

    @property
    def family(self) -> str:
        return self._family.name

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def find_dtype(self) -> torch.dtype | None:
        """Return the dtype of the weights, if `config.json` has it."""
        word = self._entries.find("dtype") or self._entries.find("torch_dtype")
        dtype = getattr(torch, str(word), None)
        return dtype if isinstance(dtype, torch.dtype) else None

    def check(self, names: Collection[str] | None = None) -> None:
        """Raise unless the files have these weights (all, if None) with the right shapes, and no unknown ones."""
        wanted = self.shapes if names is None else names
        for name in wanted:
            if name not in self.shapes:
                raise unknown("weight", name, self.shapes)
        there = set(self._files.names)
        asked = dict.fromkeys(piece.tensor for name in wanted for piece in self._pieces[name])
        missing = [tensor for tensor in asked if tensor not in there]
        if missing:
            raise self._error("lacks", missing, "download it again, or check that config.json is of these weights")
        extra = [
            tensor
            for tensor in self._files.names
            if tensor not in self._theirs and not self._family.ignores(tensor, self.settings)
        ]
        if extra:
            raise self._error("has tensors that its config.json does not explain:", extra, "the config.json of these")
        for tensor in asked:
            shape = self._files.shape(tensor)
            if shape != self._theirs[tensor]:
                raise ShardwiseError(
                    f"{tensor} in {self.folder} is {list(shape)}, and by config.json it would be"
                    f" {list(self._theirs[tensor])}",
                    remedy="the config.json of these weights",
                )

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a weight, or a region of our whole shape. Only the bytes of that region are read."""
        asked = self.region(name, region)
        dtype = self._files.dtype(self._pieces[name][0].tensor)
        target = torch.empty([each.stop - each.start for each in asked], dtype=dtype)
        self.fill(name, target, asked)
        return target

    def fill(self, name: str, target: Tensor, region: Region | None = None) -> None:
        """Read into an existing tensor of any dtype and device."""
        region = self.region(name, region)
        for piece in self._pieces[name]:
            overlap = piece.find_overlap(region)
            if overlap is not None:
                here, there = overlap
                target[here].copy_(piece.to_ours(self._files.read(piece.tensor, there)))

    def region(self, name: str, region: Region | None = None) -> Region:
        """Return a region with plain starts and stops: `slice(None)` is all of a dim, and negative ones count from its
        end."""
        shape = self.shapes[name]
        given = (slice(None),) * len(shape) if region is None else region
        assert len(given) == len(shape), f"{name} has {len(shape)} dims, and {len(given)} slices are given"
        assert all(each.step in (None, 1) for each in given), f"a part of {name} has gaps"
        return tuple(slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True))

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _error(self, verb: str, tensors: list[str], remedy: str) -> ShardwiseError:
        return ShardwiseError(f"{self.folder} {verb} {some(tensors)}", remedy=remedy)
