"""Find the expert layers of a module by their form.

    ours          a layer with `experts` and a function `exchange` that takes rows sorted by expert
    any other     experts with `num_experts`, whose parameters all have one entry for each, and whose forward takes
                  tokens, the experts chosen for each and their weights: as in transformers since 5.0

The output of the second kind must be the weighted sum of the chosen experts' outputs for each token (`trial.py`).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.sharding.expert.shared_expert import share_ahead
from shardwise.sharding.wrap_forward import wrap_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One expert layer: the experts and their name in the module, the block that calls them, and their number."""

    name: str
    experts: nn.Module
    block: nn.Module
    num_experts: int
    is_ours: bool


class Form(NamedTuple):
    """The shapes of a call: outer dims of tokens and of choices, and whether a token has a list of choices."""

    outer_of_tokens: int = 0
    outer_of_choices: int = 0
    has_list: bool = True

    def shaped(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, and the experts chosen for each with their weights, in the shapes of such a call."""
        tokens = rows.view(*(1 for _ in range(self.outer_of_tokens)), *rows.shape)
        shape = (*(1 for _ in range(self.outer_of_choices)), *(chosen.shape if self.has_list else chosen.shape[:1]))
        return tokens, chosen.reshape(shape), weights.reshape(shape)


def form_of(given: Sequence[object]) -> Form | None:
    """Return the form of a call with tokens, the experts chosen for each and their weights; None of any other."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    if len(given) != 3 or len(tensors) != 3:
        return None
    tokens, chosen, weights = tensors
    if tokens.dim() < 2 or chosen.is_floating_point() or chosen.dtype.itemsize < 2 or chosen.shape != weights.shape:
        return None
    shape, outer = tokens.shape[:-1], tokens.dim() - 2
    if weights.is_floating_point() and shape in (chosen.shape, chosen.shape[:-1]):
        return Form(outer, outer, shape != chosen.shape)
    if weights.is_floating_point() and chosen.dim() in (1, 2) and len(chosen) == shape.numel():
        return Form(outer, 0, chosen.dim() == 2)
    return None


def find_layers(module: nn.Module) -> list[ExpertLayer]:
    """Return every expert layer, in the module's order. Experts that several blocks call are one layer."""
    found: dict[int, ExpertLayer] = {}
    for name, each in module.named_modules():
        for layer in _layers_at(name, each):
            found.setdefault(id(layer.block if layer.is_ours else layer.experts), layer)
    return list(found.values())


def find_others(module: nn.Module) -> dict[str, str]:
    """Return the names of modules that look like experts but have another form, each with the reason."""
    found = {}
    for name, each in module.named_modules():
        if name.rpartition(".")[2] == "experts":
            if isinstance(each, nn.ModuleList):
                found[name] = f"its {len(each)} experts are modules, not entries of parameters"
            elif _num_experts(each) is None:
                found[name] = "its parameters do not have one entry for each of num_experts"
    return {name: why for name, why in found.items() if name not in {layer.name for layer in find_layers(module)}}


def _layers_at(name: str, block: nn.Module) -> Iterator[ExpertLayer]:
    own = getattr(block, "experts", None)
    if isinstance(own, nn.Module) and callable(block.__dict__.get("exchange")):
        counts = {len(each) for each in own.parameters()}
        assert len(counts) == 1, f"the experts of {name} do not agree how many they are: {counts}"
        path = f"{name}.experts" if name else "experts"
        yield ExpertLayer(name=path, experts=own, block=block, num_experts=counts.pop(), is_ours=True)
        return
    for key, child in block.named_children():
        count = _num_experts(child)
        if count is not None and len(inspect.signature(child.forward).parameters) == 3:
            path = f"{name}.{key}" if name else key
            yield ExpertLayer(name=path, experts=child, block=block, num_experts=count, is_ours=False)


def _num_experts(module: nn.Module) -> int | None:
    """Return the number of experts of a module; None unless all of its parameters have an entry for each."""
    count = getattr(module, "num_experts", None)
    lengths = {each.shape[0] if each.dim() > 1 else None for each in module.parameters()}
    return count if isinstance(count, int) and lengths == {count} else None


def attach(layer: ExpertLayer, dispatch: Dispatch, *, overlap: bool) -> None:
    """Make a layer dispatch its tokens to their experts. Its own experts are this rank's already."""
    if layer.is_ours:
        setattr(layer.block, "exchange", dispatch.exchange_sorted)  # noqa: B010 - a seam of theirs
        return
    signature = inspect.signature(layer.experts.forward)
    ahead = share_ahead(layer.block, layer.experts, layer.num_experts) if overlap else None
    setattr(layer.experts, "num_experts", dispatch.placement.sizes[dispatch.group.rank])  # noqa: B010

    def wrapped(call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = tuple(signature.bind(*args, **kwargs).arguments.values())
        form = form_of(given)
        if form is None:
            raise ShardwiseError(
                f"{layer.name} was called with {len(given)} arguments that are not tokens, the experts chosen for each"
                " and their weights",
                remedy="ep=1",
            )
        tokens, chosen, weights = given
        if tokens.is_meta:
            return call(tokens, chosen, weights)  # On average as many rows arrive as are sent.
        experts = call.args[0]  # type: ignore[attr-defined]
        flat = tokens.flatten(0, -2)
        meanwhile = (lambda: None) if ahead is None else lambda: ahead.compute(flat)

        def apply(rows: Tensor, numbers: Tensor, ones: Tensor) -> Tensor:
            return call(*form.shaped(rows, numbers, ones)).view(rows.shape)

        numbers, scales = (each.reshape(len(flat), -1) for each in (chosen, weights))
        made, _ = dispatch.exchange_chosen(experts, apply, flat, numbers, scales, meanwhile)
        return made.view_as(tokens)

    wrap_forward(layer.experts, wrapped)
