"""Read the safetensors files of a folder, tensor by tensor and part by part.

Files are mapped into memory, so only the pages of requested parts are read from disk.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.pieces import Region

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: So few that tensors that differ are told apart at once.
_ROWS_AT_ONCE = 4096


class Files:
    """One file, or several with an index. `bytes_read` counts the requested bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._homes: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        elif (folder / ONE_FILE).is_file():
            self._homes = dict.fromkeys(self._file(ONE_FILE).keys(), ONE_FILE)
        else:
            raise ShardwiseError(
                f"{folder} has neither {ONE_FILE} nor {INDEX}, and weights are read from safetensors alone",
                remedy="model.save_pretrained(folder) with transformers writes them",
            )

    @property
    def names(self) -> list[str]:
        return list(self._homes)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._slice(tensor).get_shape())

    def dtype(self, tensor: str) -> torch.dtype:
        part: Tensor = self._slice(tensor)[:0]  # For torch's dtype; no data is read.
        return part.dtype

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return a part of a tensor, still in the mapped file: copy it before the files are closed."""
        part: Tensor = self._slice(tensor)[region]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have equal numbers. A tensor that is not there differs from none."""
        if one not in self._homes or other not in self._homes:
            return True
        if self.shape(one) != self.shape(other):
            return False
        num_rows = self.shape(one)[0]
        cuts = (slice(row, row + _ROWS_AT_ONCE) for row in range(0, num_rows, _ROWS_AT_ONCE))
        return all(torch.equal(self._slice(one)[cut], self._slice(other)[cut]) for cut in cuts)

    def close(self) -> None:
        self._open.clear()

    def _slice(self, tensor: str) -> Any:
        try:
            return self._file(self._homes[tensor]).get_slice(tensor)
        except SafetensorError as error:
            raise ShardwiseError(
                f"{tensor} cannot be read from {self.folder / self._homes[tensor]}: {error}", remedy="download it again"
            ) from None

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not path.is_file():
                raise ShardwiseError(f"{INDEX} names {path}, which does not exist", remedy="download it again")
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ShardwiseError(f"{path} is not whole: {error}", remedy="download it again") from None
        return self._open[name]
