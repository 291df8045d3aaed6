"""Compute a block's shared expert while rows are in flight, and keep the result until the block asks for it.

    block as written      router ─ experts ──────────────────── shared expert ─ sum
    as it runs            router ─ start ─ shared expert ─ wait ─ ... (taken) ─ sum

This is possible if the block calls the shared expert after the experts, with the same tokens. One run of the block on
the meta device shows whether it does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.split.sources import storage_of


class SharedExpertAhead:
    """The shared expert's output, computed ahead within one call of the block."""

    def __init__(self) -> None:
        self.shared: nn.Module | None = None
        self._made: Tensor | None = None

    def compute(self, tokens: Tensor) -> None:
        if self.shared is not None:
            self._made = self.shared(tokens)

    def take(self) -> Tensor | None:
        made, self._made = self._made, None
        return made


def share_ahead(block: nn.Module, experts: nn.Module, num_experts: int) -> SharedExpertAhead | None:
    """Make a block's shared expert computable ahead; None if the block has none for which that is possible."""
    name = find_shared(block, experts, num_experts)
    if name is None:
        return None
    ahead = SharedExpertAhead()

    def around_block(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ahead.take()  # Discard a result left by a call that failed.
        ahead.shared = call.args[0].get_submodule(name)  # type: ignore[attr-defined]
        try:
            return call(*args, **kwargs)
        finally:
            ahead.shared = None

    def around_shared(call: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        made = ahead.take()
        return call(tokens) if made is None else made.view(*tokens.shape[:-1], made.shape[-1])

    wrap_forward(block, around_block)
    wrap_forward(block.get_submodule(name), around_shared)
    return ahead


def find_shared(block: nn.Module, experts: nn.Module, num_experts: int) -> str | None:
    """Return the child that a block calls once, after its experts, with the same tokens and nothing else."""
    calls = _calls(block, _width(block, experts, num_experts))
    own = next(name for name, each in block.named_children() if each is experts)
    names = [name for name, _ in calls]
    if own not in names:
        return None
    at = names.index(own)
    tokens = calls[at][1][:1]
    for name, given in calls[at + 1 :]:
        if names.count(name) == 1 and len(given) == 1 and all(map(_is_same, given, tokens)):
            return name
    return None


def _calls(block: nn.Module, width: int) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the children that a block calls, with their arguments; none if the block takes more than tokens."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    twin = meta_twin(block)
    for name, each in twin.named_children():
        each.register_forward_pre_hook(lambda _, given, name=name: calls.append((name, given)))
    try:
        with torch.no_grad(), Guesses():
            twin(torch.empty(1, 2, width, device="meta"))
    except Exception:
        return []
    return calls


def _width(block: nn.Module, experts: nn.Module, num_experts: int) -> int:
    """Return the width of a token: the second dim of the router's [experts, width] matrix; 0 if not found."""
    inside = {id(each) for each in experts.parameters()}
    others = [each for each in block.parameters() if id(each) not in inside]
    scores = [each.shape[1] for each in others if each.dim() == 2 and len(each) == num_experts]
    return scores[0] if scores else 0


def _is_same(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.numel() == other.numel()
        and storage_of(one) == storage_of(other)
    )
