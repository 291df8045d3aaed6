"""Recognise norms by what they compute: RMS norms with w or 1 + w, and layer norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.fusion.example import computes, small_copy
from shardwise.kernels.norm import layer_norm, rms_norm, takes_norm


@dataclass(frozen=True, slots=True)
class NormForward:
    """The norm of the last dim. `offset` is added to the weight: 1 for Gemma."""

    is_layer: bool
    eps: float | None
    offset: float = 0.0

    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(given, Tensor) or not takes_norm(given, module.weight, getattr(module, "bias", None)):
            return own(module, *args, **kwargs)
        return self.compute(given, module.weight, getattr(module, "bias", None))

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, kernels: bool = True) -> Tensor:
        if self.is_layer:
            assert self.eps is not None, "a layer norm has an epsilon"
            return layer_norm(x, weight, bias, self.eps, kernels=kernels)
        return rms_norm(x, weight, self.eps, offset=self.offset, kernels=kernels)

    def __str__(self) -> str:
        kind = "layer norm" if self.is_layer else "RMS norm"
        return f"{kind} of 1 + w" if self.offset else kind


def find_norm(module: nn.Module) -> NormForward | str | None:
    """Return the norm that a module is, or why it is not replaced; None if it does not look like one."""
    parameters = dict(module.named_parameters(recurse=False))
    if "weight" not in parameters or not parameters.keys() <= {"weight", "bias"}:
        return None
    if parameters["weight"].dim() != 1 or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    if not any(word in type(module).__name__.lower() for word in ("norm", "rms")) and not _epsilons(module):
        return None
    try:
        twin = small_copy(module)
    except Exception as error:  # Copying a module may raise anything.
        return f"it cannot be copied ({type(error).__name__})"
    width = parameters["weight"].shape[0]
    # The smallest rows are as small as the root of an epsilon, so that its effect shows.
    sizes = torch.tensor([1e-6, 1e-4, 1e-3, 1e-2, 1.0, 30.0], device="cpu")[:, None]
    generator = torch.Generator("cpu").manual_seed(2)
    given = (torch.randn((6, width), generator=generator, device="cpu") * sizes)[None]
    wanted = list(twin.parameters())
    for form in _forms(module, has_bias="bias" in parameters):

        def plain(x: Tensor, form: NormForward = form) -> Tensor:
            return form.compute(x, twin.get_parameter("weight"), getattr(twin, "bias", None), kernels=False)

        if computes(twin, plain, [given], wanted):
            return form
    return "it computes another function than the norms that have kernels"


def _epsilons(module: nn.Module) -> list[float | None]:
    found = [each for each in vars(module).values() if isinstance(each, float) and 0 <= each < 0.1]
    return [*dict.fromkeys(found)]


def _forms(module: nn.Module, *, has_bias: bool) -> list[NormForward]:
    epsilons = _epsilons(module)
    layers = [NormForward(True, each) for each in epsilons]
    if has_bias:
        return layers
    epsilons = [*epsilons, *([None] if None in vars(module).values() else [])]
    return [NormForward(False, each, offset) for offset in (0.0, 1.0) for each in epsilons] + layers
