"""Recognise gated MLPs: down(activation(gate(x)) * up(x)), of three linear layers, or of two with gate and up in
one."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.fusion.example import computes, small_copy, small_linear
from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.gated import ACTIVATIONS, Activation, gated

_WIDTH, _INNER = 6, 10


@dataclass(frozen=True, slots=True)
class GatedForward:
    """The names of the layers; `up` is None if the gate's layer computes both, one half after the other."""

    gate: str
    up: str | None
    down: str
    activation: Activation
    #: Whether the gate is the second half.
    is_turned: bool = False

    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        # The compiler traces the module's own forward, which it can fuse itself.
        if not isinstance(given, Tensor) or not takes_kernel("gated", given):
            return own(module, *args, **kwargs)
        return self.compute(module, given)

    def compute(self, module: nn.Module, x: Tensor, *, kernels: bool = True) -> Tensor:
        """Compute by calling the module's current layers, which may be sharded, adapted or wrapped."""
        first: Tensor = getattr(module, self.gate)(x)
        if self.up is not None:
            gate, up = first, getattr(module, self.up)(x)
        else:
            gate, up = first.chunk(2, dim=-1)
            gate, up = (up, gate) if self.is_turned else (gate, up)
        made: Tensor = getattr(module, self.down)(gated(gate, up, self.activation, kernels=kernels))
        return made

    def __str__(self) -> str:
        return f"MLP with a {self.activation} gate"


def find_gate(module: nn.Module) -> GatedForward | str | None:
    """Return the gated MLP that a module is, or why it is not replaced; None if it does not look like one."""
    layers = {name: each for name, each in module.named_children() if _is_linear(each)}
    others = [each for name, each in module.named_children() if name not in layers]
    if len(layers) not in (2, 3) or len(others) > 2 or any(True for _ in module.parameters(recurse=False)):
        return None
    if any(any(True for _ in each.parameters()) for each in others):
        return None
    if any(isinstance(each, nn.Dropout) for each in others):
        return "it drops numbers between its layers"
    orders = _orders(layers)
    if not orders:
        return None
    reasons = "it computes another function than a gate that has a kernel"
    for gate, up, down in orders:
        inner = 2 * _INNER if up is None else _INNER
        stand_ins = {
            name: small_linear(*((_INNER, _WIDTH) if name == down else (_WIDTH, inner)), bias=_has_bias(layer))
            for name, layer in layers.items()
        }
        if up is not None:
            # Two layers of one shape are told apart by their values.
            with torch.no_grad():
                stand_ins[up].weight.copy_(stand_ins[up].weight.flip(0) * 0.7)
        try:
            twin = small_copy(module, children=stand_ins)
        except Exception as error:  # Copying a module may raise anything.
            return f"it cannot be copied ({type(error).__name__})"
        found = _form_of(twin, gate, up, down)
        if found is not None:
            return found
    return reasons


def _form_of(twin: nn.Module, gate: str, up: str | None, down: str) -> GatedForward | None:
    given = torch.randn((2, 5, _WIDTH), generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    parameters = list(twin.parameters())
    for activation in ACTIVATIONS:
        for is_turned in (False, True) if up is None else (False,):
            form = GatedForward(gate, up, down, cast(Activation, activation), is_turned)

            def plain(x: Tensor, form: GatedForward = form) -> Tensor:
                return form.compute(twin, x, kernels=False)

            if computes(twin, plain, [given], parameters):
                return form
    return None


def _is_linear(module: nn.Module) -> bool:
    """Whether a module looks linear by its attributes: linear layers, and the adapters and quantisers that replace
    them."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(each, int) for each in sizes)


def _has_bias(layer: nn.Module) -> bool:
    return getattr(layer, "bias", None) is not None


def _orders(layers: dict[str, nn.Module]) -> list[tuple[str, str | None, str]]:
    """Return the possible roles of the layers, by their sizes."""

    def size(name: str) -> tuple[int, int]:
        return cast(int, layers[name].in_features), cast(int, layers[name].out_features)

    if len(layers) == 2:
        return [
            (first, None, down)
            for first, down in permutations(layers)
            if size(first)[1] == 2 * size(down)[0] and size(first)[0] == size(down)[1]
        ]
    return [
        (gate, up, down)
        for gate, up, down in permutations(layers)
        if size(gate) == size(up) == tuple(reversed(size(down)))
    ]
