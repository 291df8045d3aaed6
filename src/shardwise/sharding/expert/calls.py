"""How a module calls its experts, and what else reads their parameters: one run on the meta device shows both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.expert.layers import ExpertLayer
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.stage import Batch
from shardwise.torch_private import EagerDispatchMode, pytree


@dataclass(slots=True, kw_only=True)
class Calls:
    """The arguments of a layer's calls, on the meta device, and the parameters of it that are read outside of them."""

    given: list[tuple[Any, ...]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)


def observe(module: nn.Module, layers: Sequence[ExpertLayer], example: Batch | None) -> dict[str, Calls]:
    """Return the calls of each layer; none if there is no example, or if the module does not run on the meta device."""
    found = {each.name: Calls() for each in layers}
    if example is None or not layers:
        return {}
    twin = meta_twin(module)
    watch = _Watch(twin, found)
    try:
        args, kwargs = Signature(twin).arguments(example)
        args, kwargs = pytree.tree_map(
            lambda each: each.to("meta") if isinstance(each, Tensor) else each, (args, kwargs)
        )
        with torch.no_grad(), Guesses(), watch:
            twin(*args, **kwargs)
    except Exception:
        return {}
    return found


class _Watch(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the arguments of each layer, and operations on its parameters while it does not run."""

    def __init__(self, twin: nn.Module, calls: dict[str, Calls]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._running = calls, ""
        self._owners: dict[int, tuple[str, str]] = {}
        for name in calls:
            experts = twin.get_submodule(name)
            self._owners |= {id(each): (name, f"{name}.{key}") for key, each in experts.named_parameters()}
            wrap_forward(experts, self._around(name, experts))

    def _around(self, name: str, experts: nn.Module) -> Callable[..., Any]:
        bound = signature(experts.forward)

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._calls[name].given.append(tuple(bound.bind(*args, **kwargs).arguments.values()))
            before, self._running = self._running, name
            try:
                return call(*args, **kwargs)
            finally:
                self._running = before

        return around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        for each in pytree.tree_leaves((args, kwargs or {})):
            name, parameter = self._owners.get(id(each), ("", ""))
            if name != self._running and name and parameter not in self._calls[name].read:
                self._calls[name].read.append(parameter)
        return func(*args, **(kwargs or {}))
