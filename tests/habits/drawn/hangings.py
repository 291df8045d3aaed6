"""What people hang on a module after it was made: hooks, ties, marks, parametrizations, frozen parts."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

#: Changes a module. The number says where: it counts round the places that there are.
Hang = Callable[[nn.Module, int], None]


class Doubled(nn.Linear):
    """A layer whose forward is its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [
        each
        for each in module.modules()
        if isinstance(each, nn.Linear) and type(each).__name__ != "NonDynamicallyQuantizableLinear"
    ]


def _plain(module: nn.Module) -> list[nn.Linear]:
    """Those that were not parametrized before."""
    return [each for each in _linears(module) if isinstance(each.__dict__["_parameters"].get("weight"), nn.Parameter)]


def _at(found: list[Any], number: int) -> Any:
    return found[number % len(found)]


def _modules(module: nn.Module) -> list[nn.Module]:
    return [
        each for name, each in module.named_modules() if name and not isinstance(each, (nn.ModuleList, nn.ModuleDict))
    ]


def _scaled(_: Any, __: Any, out: Any) -> Any:
    return out * 1.25 if isinstance(out, Tensor) else None


def _scaled_before(_: Any, given: Any) -> Any:
    return tuple(each * 0.75 if isinstance(each, Tensor) and each.is_floating_point() else each for each in given)


def _scaled_back(_: Any, given: Any, __: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in given)


def _looks(_: Any, __: Any, ___: Any) -> None:
    return None


def _forward_hook(module: nn.Module, number: int) -> None:
    _at(_modules(module), number).register_forward_hook(_scaled)


def _looking_hook(module: nn.Module, number: int) -> None:
    _at(_modules(module), number).register_forward_hook(_looks)


def _pre_hook(module: nn.Module, number: int) -> None:
    _at(_modules(module), number).register_forward_pre_hook(_scaled_before)


def _backward_hook(module: nn.Module, number: int) -> None:
    _at(_linears(module), number).register_full_backward_hook(_scaled_back)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def _gradient_hook(module: nn.Module, number: int) -> None:
    _at(_weights(module), number).register_hook(lambda gradient: gradient * 0.5)


def _gradient_mask(module: nn.Module, number: int) -> None:
    weight = _at(_weights(module), number)
    mask = (torch.arange(weight.numel()).view(weight.shape) % 3 > 0).to(weight)
    weight.register_hook(lambda gradient: gradient * mask.to(gradient))


def _gradient_clamp(module: nn.Module, number: int) -> None:
    _at(_weights(module), number).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def _marked(module: nn.Module, number: int) -> None:
    for place, each in enumerate(module.parameters()):
        if place % 3 == number % 3:
            each.no_decay = True


def _weight_norm(module: nn.Module, number: int) -> None:
    if found := _plain(module):
        parametrizations.weight_norm(_at(found, number))


def _old_weight_norm(module: nn.Module, number: int) -> None:
    if found := _plain(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(_at(found, number))


def _orthogonal(module: nn.Module, number: int) -> None:
    if found := _plain(module):
        parametrizations.orthogonal(_at(found, number))


def _spectral(module: nn.Module, number: int) -> None:
    if found := _plain(module):
        parametrizations.spectral_norm(_at(found, number))


def _frozen(module: nn.Module, number: int) -> None:
    weights = list(module.parameters())
    for each in weights[number % len(weights) :][: max(1, len(weights) // 4)]:
        each.requires_grad_(False)


def _frozen_module(module: nn.Module, number: int) -> None:
    chosen = _at(_modules(module), number)
    if len(list(chosen.parameters())) < len(_weights(module)):
        chosen.requires_grad_(False)


def _tied(module: nn.Module, number: int) -> None:
    """Two layers of one shape get one weight."""
    pairs = [
        (one, other)
        for at, one in enumerate(_plain(module))
        for other in _plain(module)[at + 1 :]
        if one.weight.shape == other.weight.shape and one.weight is not other.weight
    ]
    if pairs:
        one, other = _at(pairs, number)
        other.weight = one.weight


def _tied_head(module: nn.Module, _: int) -> None:
    embed, head = module.get_submodule("embed"), module.get_submodule("head")
    if isinstance(embed, nn.Embedding):
        head.weight = embed.weight


def _same_block(module: nn.Module, number: int) -> None:
    """A block is used again in the place of another."""
    blocks: Any = module.get_submodule("blocks")
    keys = list(blocks._modules)
    blocks._modules[keys[number % len(keys)]] = blocks._modules[keys[0]]


def _patched(module: nn.Module, number: int) -> None:
    layer = _at(_linears(module), number)
    own = layer.forward
    layer.forward = lambda x: own(x) * 1.5


def _subclass(module: nn.Module, number: int) -> None:
    layer = _at(_linears(module), number)
    if type(layer) is nn.Linear:
        layer.__class__ = Doubled


def _in_evaluation(module: nn.Module, number: int) -> None:
    module.train()
    _at(_modules(module), number).eval()


#: Ties first: hooks and marks hang on what is there then.
HANGS: dict[str, Hang] = {
    "tied head": _tied_head,
    "tied": _tied,
    "the same block": _same_block,
    "forward hook": _forward_hook,
    "a hook that looks": _looking_hook,
    "pre hook": _pre_hook,
    "backward hook": _backward_hook,
    "gradient hook": _gradient_hook,
    "gradient mask": _gradient_mask,
    "gradient clamp": _gradient_clamp,
    "marked": _marked,
    "weight_norm": _weight_norm,
    "old weight_norm": _old_weight_norm,
    "orthogonal": _orthogonal,
    "spectral_norm": _spectral,
    "frozen": _frozen,
    "frozen module": _frozen_module,
    "patched": _patched,
    "subclass": _subclass,
    "partly in evaluation": _in_evaluation,
}
