"""The weights of a transformer by name: their shapes, slices of them, and how to fill them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.torch_private import buffer_slots, parameter_slots

#: Maps a weight's name and its whole shape to the part that a rank holds, one slice per dim.
Slices = Callable[[str, tuple[int, ...]], tuple[slice, ...]]


def shapes_of(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every saved weight, by name. A tied head is under the embedding's name only."""
    with torch.device("meta"):
        whole = Transformer(settings).state_dict()
    if settings.tied:
        del whole["head.weight"]
    return {name: tuple(each.shape) for name, each in whole.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a module, each by its first name."""
    saved = set(module.state_dict())
    buffers = {name: each for name, each in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}


def place(module: nn.Module, name: str, *, device: torch.device | str | None = None) -> Tensor:
    """Return the memory of a parameter or buffer, to be filled without autograd.

    It is new memory if the weight is on the meta device, or is to be moved. Its dtype stays, and tied weights stay
    tied.
    """
    owner, _, key = name.rpartition(".")
    old: Tensor = getattr(module.get_submodule(owner), key)
    target = torch.device(device) if device is not None else torch.device("cpu") if old.is_meta else old.device
    if not old.is_meta and old.device == target:
        return old
    # Not `empty_like`: of a tensor on the meta device it loads sympy (half a second).
    new = torch.empty(old.shape, dtype=old.dtype, device=target)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    _replace(module, old, new)
    return new


def _replace(module: nn.Module, old: Tensor, new: Tensor) -> None:
    for each in module.modules():
        for held in (parameter_slots(each), buffer_slots(each)):
            for key, tensor in held.items():
                if tensor is old:
                    held[key] = new
