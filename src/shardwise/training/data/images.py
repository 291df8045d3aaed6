"""Random images in place of a token file. There is nothing to learn, but training does all of its work.

    data.source=images:224      3 x 224 x 224 bytes an image, of one of 1000 classes; a row is an image

An image and its class are generated from its index alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ShardwiseError

#: The sizes of ImageNet.
NUM_IMAGES, NUM_CLASSES = 1_281_167, 1000
_SOURCE = re.compile(r"images:(\d+)")


def find_size(source: str) -> int | None:
    """Return the height of a source's images, or None if the source is not `images:`."""
    if source.partition(":")[0] != "images":
        return None
    found = _SOURCE.fullmatch(source)
    if found is None or not 8 <= int(found[1]) <= 4096:
        raise ShardwiseError(
            f"data.source={source} is not an image size, from 8 to 4096 pixels a side", remedy="data.source=images:224"
        )
    return int(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """A contiguous range of the images."""

    size: int
    first_row: int
    num_rows: int

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return `images`, uint8 [rows, 3, size, size], and `labels`, [rows]."""
        shape, numbers = (3, self.size, self.size), (rows + self.first_row).tolist()
        images, labels = np.empty((len(rows), *shape), np.uint8), np.empty(len(rows), np.int64)
        for place, number in enumerate(numbers):
            drawn = np.random.Generator(np.random.SFC64(number))
            labels[place] = drawn.integers(NUM_CLASSES)
            images[place] = np.frombuffer(drawn.bytes(images[place].size), np.uint8).reshape(shape)
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomImages:
    """All images, with the interface of `Tokens`."""

    size: int
    vocabulary: int = NUM_CLASSES
    num_tokens: int = NUM_IMAGES
    tokenizer: str = "images"

    @property
    def digest(self) -> str:
        return blake2b(f"images {self.size} {NUM_IMAGES} {NUM_CLASSES}".encode(), digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """The bytes read from a file: none."""
        return 0

    def parts(self, *, held_out: float, batch: int) -> tuple[ImageRows, ImageRows]:
        """Return the images to train on, and those for evaluation: the last ones, at least a batch if any."""
        kept = 0 if held_out == 0 else max(batch, round(NUM_IMAGES * held_out))
        first = NUM_IMAGES - kept
        if first < batch:
            raise ShardwiseError(
                f"a batch of {batch} images is more than the {NUM_IMAGES} that there are", remedy="a smaller batch"
            )
        return (
            ImageRows(size=self.size, first_row=0, num_rows=first),
            ImageRows(size=self.size, first_row=first, num_rows=kept),
        )


def check_images(sequence: int, source: str | None, takes: Mapping[str, Any] | None = None) -> None:
    """Refuse images for a module that reads tokens. `takes` are the parameters of its forward, once known."""
    if source is None:
        raise ShardwiseError(
            "data.source has images, and the model is a transformer that reads tokens",
            remedy="model.source=shardwise.nets.resnet:resnet50, or shardwise train resnet50",
        )
    if sequence != 1:
        raise ShardwiseError(
            f"data.sequence={sequence} tokens a row, and a row of images is one image", remedy="data.sequence=1"
        )
    if takes is not None and "images" not in takes:
        raise ShardwiseError(
            f"the module of model.source={source} takes {', '.join(takes)}, and batches of images have images",
            remedy="def forward(self, images), or a token file as data.source",
        )
