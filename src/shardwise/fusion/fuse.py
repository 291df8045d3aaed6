"""`fuse`: use kernels in modules that compute the same, and list what was replaced, and what was not and why.

    norms        RMS norms of w or 1 + w, layer norms                        kernels/norm.py
    MLPs         silu, gelu and tanh gates                                   kernels/gated.py
    experts      the same, as entries of two parameters                      kernels/experts.py
    attention    rotary positions; torch's fastest attention if there is no mask
    heads        lazy logits for the cross entropy                           kernels/lazy_logits.py

One module of each kind is tried on a small example, forward and backward, in float32 on the CPU, against the definition
of the kernel. On a CPU, for dtypes that kernels lack, and while a compiler traces, the module's own forward runs.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import some
from shardwise.fusion.attention import find_attention, halves_are_alike
from shardwise.fusion.example import kind_of
from shardwise.fusion.experts import find_experts
from shardwise.fusion.gates import find_gate
from shardwise.fusion.heads import HeadForward, find_head
from shardwise.fusion.norms import find_norm
from shardwise.fusion.replace import is_on, is_replaced, replace, switch, why_not
from shardwise.kernels.choose import is_interpreted, settle
from shardwise.stages.batch import home_of
from shardwise.stages.stage import Batch, Loss
from shardwise.torch_private import is_compiled_function

_LOG = logging.getLogger("shardwise")


@dataclass(slots=True)
class Fused:
    """What was replaced, by name, and what was not and why."""

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Restore the module's own forwards."""
        for each in reversed(self._undo):
            each()
        self._undo.clear()

    def lines(self) -> list[str]:
        """Return a description for people."""
        counts = Counter(self.replaced.values())
        made = [f"{count} x {what}" for what, count in counts.items()]
        lines = [f"kernels in place of {', '.join(made)}"] if made else []
        for why in dict.fromkeys(self.left.values()):
            lines.append(f"left as written: {some([name for name, each in self.left.items() if each == why])}: {why}")
        return lines


def settle_kernels(module: nn.Module, loss: Loss, example: Batch, *, kernels: bool) -> Fused:
    """Set up kernels for training a module with this loss on the example's device, for `nets` and other modules."""
    settle(module, loss, kernels=kernels)
    if not has_kernels([home_of(example)]):
        return Fused()
    return fuse(module, kernels=kernels, waits=not is_compiled_function(loss))


def settle_placed(module: nn.Module, devices: Iterable[torch.device], *, kernels: bool) -> Fused:
    """Set up kernels for these devices. Logits are not lazy: weights may have been moved when they are computed."""
    settle(module, None, kernels=kernels)
    return fuse(module, kernels=kernels, waits=False) if has_kernels(devices) else Fused()


def num_with_kernels(module: nn.Module) -> int:
    """Return how many submodules would use kernels on a device that has them."""
    return sum(vars(each).get("kernels") is True or is_on(each) for each in module.modules())


def has_kernels(devices: Iterable[torch.device]) -> bool:
    """Whether any of these devices has kernels: a GPU, or a CPU in Triton's interpreter."""
    return any(each.type == "cuda" or (each.type == "cpu" and is_interpreted()) for each in devices)


def fuse(module: nn.Module, *, kernels: bool = True, waits: bool = True) -> Fused:
    """Use kernels in modules that are not ours, where they compute the same. Without `waits` heads are not replaced.

    Modules with hooks or a patched forward are left alone, and so are those of `nets`, which use kernels anyway.
    """
    switch(module, on=kernels)
    fused = Fused()
    if not kernels:
        return fused
    found = _Finder(module, waits=waits)
    for name, each in list(module.named_modules()):
        if (
            is_replaced(each)
            or isinstance(vars(each).get("kernels"), bool)
            or isinstance(vars(each).get("waits"), bool)
        ):
            continue
        form = found.form_of(each)
        if form is None:
            continue
        problem = why_not(each) or (form if isinstance(form, str) else None)
        if problem is not None:
            fused.left[name or "the module"] = problem
            continue
        attributes = {"keeps_eager": True, "waits": True} if isinstance(form, HeadForward) else {}
        fused._undo.append(replace(each, form, **attributes))
        fused.replaced[name or "the module"] = str(form)
    for line in fused.lines():
        _LOG.info(line)
    return fused


class _Finder:
    """Finds what modules compute; each kind is tried once."""

    def __init__(self, module: nn.Module, *, waits: bool) -> None:
        self._words = {each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)}
        self._has_halves = halves_are_alike(module)
        self._waits = waits
        self._known: dict[Any, Any] = {}

    def form_of(self, module: nn.Module) -> Any:
        kind = kind_of(module)
        if kind not in self._known:
            self._known[kind] = self._find(module)
        return self._known[kind]

    def _find(self, module: nn.Module) -> Any:
        tries: list[Callable[[nn.Module], Any]] = [
            find_norm,
            lambda each: find_attention(each, has_halves=self._has_halves),
            find_gate,
            lambda each: find_head(each, self._words) if self._waits else None,
            find_experts,
        ]
        return next((form for each in tries if (form := each(module)) is not None), None)
