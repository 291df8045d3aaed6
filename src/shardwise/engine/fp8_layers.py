"""Choose the linear layers of a module that are computed in 8 bits. The others stay as they are, with a reason.

    in 8 bits    linear layers, whole or cut over tp, of the blocks that a module is made of
    as before    the head and everything outside blocks; embeddings, norms, routers, experts; layers with a forward or
    hooks              of their own (`sharding/tensor/plain_layers.py`); sizes that are not multiples of 16

A layer keeps its parameters and their names. It becomes an instance of a class of the same name whose forward is
`kernels.fp8_linear`, and gets its own class back when the engine is closed.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, some
from shardwise.kernels.fp8 import MULTIPLE, Scales, fp8_linear, has_products
from shardwise.sharding.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from shardwise.sharding.tensor.plain_layers import is_transposed, why_whole
from shardwise.sharding.tensor.products import Fp8Products, Products
from shardwise.sharding.tensor.vocabulary import VocabularyHead
from shardwise.torch_private import parameter_slots

_ROUTER = re.compile(r"gate|gating|wg|.*router.*")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


class _Narrow:
    """The forward of a linear layer in 8 bits."""

    fp8: Fp8Products
    #: The class that the layer had before.
    plain: type[nn.Module] = nn.Linear
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it, which a caller may use.
        fp8 = self.fp8
        weight = self.weight if self.plain is nn.Linear or not is_transposed(self) else self.weight.t()  # type: ignore[arg-type]
        return fp8_linear(
            input, weight, self.bias, scales=fp8.scales, products=fp8.on_device, kernels=fp8.kernels
        )  # fmt: skip


class Linear(_Narrow, nn.Linear):  # type: ignore[misc]
    """Torch's linear layer in 8 bits, as a class that can be pickled."""


@cache
def _narrow_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain is nn.Linear:
        return Linear
    return type(plain.__name__, (_Narrow, plain), {"__module__": plain.__module__, "plain": plain})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Layers:
    """The names of layers in 8 bits, and of the others, with the reason."""

    narrow: tuple[str, ...]
    wide: Mapping[str, str]
    how: Fp8Products

    def describe(self) -> list[str]:
        """Describe the choice in lines, with layers of many blocks listed once."""
        emulated = "" if self.how.on_device else ", emulated: this device has no products of 8-bit numbers"
        scales = f"a scale for each {self.how.scales}"
        lines = [f"in fp8 ({scales}{emulated}): {len(self.narrow)} linear layers: {', '.join(_once(self.narrow))}"]
        for why in dict.fromkeys(self.wide.values()):
            names = _once([name for name, reason in self.wide.items() if reason == why])
            lines.append(f"not in fp8: {', '.join(names)}: {why}")
        return lines


def use_fp8(module: nn.Module, scales: Scales, device: torch.device, *, kernels: bool = True) -> Fp8Layers:
    """Compute the linear layers of a module in 8 bits, where possible."""
    how = Fp8Products(scales=scales, on_device=has_products(device), kernels=kernels)
    chosen, wide = _choose(module)
    if not chosen:
        why = next(iter(wide.values()), "it has none")
        raise ShardwiseError(
            f"no linear layer of {type(module).__name__} can be computed in fp8: {why}", remedy="precision=bf16"
        )
    odd = [name for name, why in wide.items() if "multiples of" in why]
    if odd:
        warnings.warn(
            f"{len(odd)} linear layers stay in bf16, as their sizes on this rank are no multiples of {MULTIPLE}:"
            f" {some(list(_once(odd)))}",
            stacklevel=2,
        )
    for layer in chosen.values():
        if isinstance(layer, ColumnParallelLinear):
            layer.together.products = how
        elif isinstance(layer, RowParallelLinear):
            layer.products = how
        else:
            made: Any = layer
            kind: Any = type(layer)
            made.__class__, made.fp8 = _narrow_class(kind), how
    return Fp8Layers(narrow=tuple(chosen), wide=wide, how=how)


def restore_layers(module: nn.Module) -> None:
    """Give linear layers their own classes back."""
    for each in module.modules():
        made: Any = each
        if isinstance(each, _Narrow):
            made.__class__ = each.plain
            del made.fp8
        elif isinstance(each, ColumnParallelLinear):
            each.together.products = Products()
        elif isinstance(each, RowParallelLinear):
            each.products = Products()


def _choose(module: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers to compute in 8 bits, by name; and the others, with the reason."""
    layers = {name: each for name, each in module.named_modules() if _is_linear(each)}
    blocks = _blocks(module)
    head = None if blocks or len(layers) < 2 else next(reversed(layers))
    tied = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    wide: dict[str, str] = {}
    for name, layer in layers.items():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if isinstance(layer, VocabularyHead) or name == head or id(layer.weight) in tied:
            wide[name] = "the head"
        elif blocks and not inside:
            wide[name] = "outside of the blocks that the module repeats"
        elif (why := _why_wide(module, name, layer)) is not None:
            wide[name] = why
    _decide_together(layers, wide)
    return {name: each for name, each in layers.items() if name not in wide}, wide


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, ParallelLinear)) or is_transposed(layer)


def _blocks(module: nn.Module) -> set[str]:
    """Return the names of repeated modules with layers inside: items of lists, or siblings of one class."""
    found: set[str] = set()
    for name, parent in module.named_modules():
        children = [(key, each) for key, each in parent.named_children() if any(map(_is_linear, _inside(each)))]
        kinds = [type(each) for _, each in children]
        for key, each in children:
            if isinstance(parent, nn.ModuleList) or kinds.count(type(each)) > 1:
                found.add(f"{name}.{key}" if name else key)
    return found


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    return (each for each in module.modules() if each is not module)


def _why_wide(module: nn.Module, name: str, layer: nn.Module) -> str | None:
    """Return why a layer of a block is not in 8 bits; None if it is."""
    *path, own = name.split(".")
    parent = module.get_submodule(".".join(path))
    if "experts" in path:
        return "an expert: products of experts are in bf16"
    if _ROUTER.fullmatch(own) and (hasattr(parent, "experts") or "router" in own):
        return "a router: a rounded score sends a token to another expert"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies with its weight by itself"
    if not isinstance(layer, ParallelLinear) and (why := why_whole(layer)) is not None:
        return why
    sizes = tuple(parameter_slots(layer)["weight"].shape)
    if any(size % MULTIPLE for size in sizes):
        return f"its sizes, {' x '.join(map(str, sizes))}, are no multiples of {MULTIPLE}"
    return None


def _decide_together(layers: Mapping[str, nn.Module], wide: dict[str, str]) -> None:
    """Let linear layers with the same input be either all in 8 bits or none."""
    for name, layer in layers.items():
        if name in wide or not isinstance(layer, ColumnParallelLinear):
            continue
        others = {id(each) for each in layer.together.members}
        why = next((wide[other] for other, each in layers.items() if id(each) in others and other in wide), None)
        if why is not None:
            wide[name] = f"computed together with a layer of which {why}"


def _once(names: Any) -> dict[str, None]:
    """Return the names without the numbers of blocks, each once."""
    return dict.fromkeys(_NUMBERS.sub("*", name) for name in names)
