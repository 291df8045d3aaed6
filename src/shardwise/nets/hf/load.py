"""Load weights of a folder into a module: only requested weights and parts, one piece at a time."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.checkpoint import Checkpoint
from shardwise.nets.rotary import Rotary
from shardwise.nets.router import Router
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import Slices, place, weights_of


@torch.no_grad()
def load(
    folder: Path | str,
    module: nn.Module,
    *,
    only: Collection[str] | None = None,
    slices: Slices | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Fill a module with the weights of a folder, and return how many bytes were read.

    `only` names the weights to fill (all that the module has, if None). `slices(name, shape)` gives the part of a
    weight that this process holds, if not all of it. A weight on the meta device gets memory on `device`; others are
    filled where they are, or moved to `device`. The module's dtypes stay.
    """
    held = weights_of(module)
    names = list(held) if only is None else [name for name in held if name in only]
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(names)
        for name in names:
            shape = checkpoint.shapes[name]
            region = checkpoint.region(name, None if slices is None else slices(name, shape))
            part = [each.stop - each.start for each in region]
            if list(held[name].shape) != part:
                of = "" if slices is None else f", and the part of this process is {part}"
                raise ShardwiseError(
                    f"{name} is {list(shape)} in {folder}{of}, but the module holds {list(held[name].shape)}",
                    remedy="a module of the folder's own settings (load_model), or slices= that fit the module",
                )
            checkpoint.fill(name, place(module, name, device=device), region)
        bytes_read = checkpoint.bytes_read
    _ready(module, device)
    return bytes_read


def load_model(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """Return the model of a folder with its weights, in their dtype unless another is given."""
    with Checkpoint(folder) as checkpoint:
        settings, dtype = checkpoint.settings, dtype or checkpoint.find_dtype() or torch.float32
    with torch.device("meta"):
        module = Transformer(settings)
    for parameter in module.parameters():  # Buffers of routers stay in float32.
        parameter.data = parameter.data.to(dtype)
    load(folder, module, device=device)
    return module.eval()


def _ready(module: nn.Module, device: torch.device | str | None) -> None:
    """Prepare buffers that are not saved."""
    for each in module.modules():
        if isinstance(each, Router) and (each.load.is_meta or device is not None):
            place(each, "load", device=device).zero_()
        elif isinstance(each, Rotary) and device is not None:
            each.to(device)
