"""The layer that scores words. In training on a GPU its logits are computed when somebody looks at them.

The loss of `loss.py` never does: it takes hidden states and weight, and has its logits chunk by chunk. Whoever else is
given them (a loss of the user's, a print) finds logits, of the shape and with the gradients that they always have.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwise.kernels import linear_cross_entropy
from shardwise.kernels.choose import autocast_type, takes_kernel
from shardwise.torch_private import without_subclasses

#: What is asked of logits without looking at their numbers, and is as of the hidden states.
_FACTS: set[Any] = {
    Tensor.is_floating_point,
    Tensor.dim,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "is_cuda")
    ),
}


class LazyLogits(Tensor):
    """Hidden states that look like their logits."""

    weight: Tensor
    #: The type that a linear layer would have computed in.
    computing: torch.dtype
    _logits: Tensor | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor) -> "LazyLogits":
        computing = autocast_type(hidden.device) or hidden.dtype
        made = hidden.as_subclass(LazyLogits)
        made.weight, made.computing, made._logits = weight, computing, None
        return made

    @property
    def hidden(self) -> Tensor:
        with without_subclasses():
            return self.as_subclass(Tensor).to(self.computing)

    def logits(self) -> Tensor:
        """All of them, computed once."""
        if self._logits is None:
            with torch.autocast(self.weight.device.type, enabled=False):
                self._logits = linear(self.hidden, self.weight.to(self.computing))
        return self._logits

    def summed_loss(self, labels: Tensor, ignored: int) -> Tensor:
        """The sum of the tokens' cross entropies, in float32."""
        if self._logits is not None:  # Somebody has looked, and may have written into them.
            flat = self._logits.flatten(0, -2).float()
            return nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=ignored, reduction="sum")
        with torch.autocast(self.weight.device.type, enabled=False):
            weight = self.weight.to(self.computing)
            hidden = self.hidden.flatten(0, -2)
            return linear_cross_entropy(hidden, weight, labels.flatten(), ignore_index=ignored, reduction="sum")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], LazyLogits) else None
        if given is not None and given._logits is None:
            with without_subclasses():
                if func in _FACTS:
                    return func(*args, **kwargs)
                if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
                    return given.computing
                shape = torch.Size((*Tensor.size(given)[:-1], given.weight.shape[0]))
            if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return shape
            if func is Tensor.size:
                rest = (*args[1:], *kwargs.values())
                return shape[rest[0]] if rest and rest[0] is not None else shape
        return func(*map(_read, args), **{key: _read(each) for key, each in kwargs.items()})


def _read(each: Any) -> Any:
    """Logits wherever they are among arguments."""
    if isinstance(each, LazyLogits):
        return each.logits()
    return type(each)(map(_read, each)) if type(each) in (list, tuple) else each


class Head(nn.Linear):
    """A linear layer without a bias. Where it `waits`, its logits wait for somebody who looks at them: an engine has it
    so, which knows what becomes of them."""

    #: A compiler sees one product here, and nothing to fuse; what waits is not for it.
    keeps_eager = True

    def __init__(self, width: int, words: int) -> None:
        super().__init__(width, words, bias=False)
        self.waits = False

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it, which a caller may use.
        waits = self.waits and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        # Weights that are cast for every step cost more than whole logits and a compiled loss: 95 % of the speed of a
        # Llama-1B on an H200, for 4 GiB.
        waits = waits and autocast_type(input.device) in (None, self.weight.dtype)
        if waits and takes_kernel("linear_cross_entropy", input, self.weight):
            return LazyLogits.of(input, self.weight)
        return super().forward(input)
