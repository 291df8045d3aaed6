"""Initial weights, from the seed and each weight's name alone.

The order of initialisation, the subset that a process holds, and the device do not matter: values are drawn on the CPU
unless another device is requested, with a separate generator for each weight.
"""

import hashlib
import math
from collections.abc import Collection

import torch
from torch import Tensor

from shardwise.nets.rotary import Rotary
from shardwise.nets.router import Router
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import Slices, place, shapes_of, weights_of

#: The standard deviation of GPT-2 (Radford et al. 2019).
_DEVIATION = 0.02


@torch.no_grad()
def initialise(
    module: Transformer,
    seed: int,
    *,
    only: Collection[str] | None = None,
    slices: Slices | None = None,
    device: torch.device | str | None = None,
    drawn_there: bool = False,
) -> None:
    """Give a model its initial values. Weights on the meta device get memory on `device`. `only` names the weights.

    With `drawn_there` values are drawn on that device: fast, but not the same as on another kind of device.

    `slices` gives the part of a weight that this process holds, if not all of it: its values are those of the whole.
    """
    shapes = shapes_of(module.settings)
    for name in weights_of(module):
        if only is None or name in only:
            where = device if drawn_there and device is not None else "cpu"
            value = initial_value(module.settings, name, shapes[name], seed, where)
            part = value if slices is None else value[slices(name, shapes[name])]
            place(module, name, device=device).copy_(part)
    for each in module.modules():
        if isinstance(each, Router):
            place(each, "load", device=device).zero_()
        elif isinstance(each, Rotary) and device is not None:
            each.to(device)


def initial_value(
    settings: Settings, name: str, shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the whole initial value of one weight: norms start as the identity, biases at 0, all others are drawn.

    Weights whose output is added to the residual are scaled down with depth, so that the residual does not grow.
    """
    owner, kind = name.split(".")[-2:]
    if kind in ("bias", "correction"):
        return torch.zeros(shape, device=device)
    if owner.endswith("norm"):
        return torch.ones(shape, device=device)
    deviation = _DEVIATION
    if "o_proj" in (owner, kind) or "down_proj" in (owner, kind):
        deviation /= math.sqrt(2 * settings.num_layers)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randn(shape, generator=generator, device=device) * deviation
