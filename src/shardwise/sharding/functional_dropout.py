"""Functions that drop at random inside of a module's forward: who calls them, and masks for them that no plan changes.

    nn.functional.dropout(hidden, 0.1, self.training)
    nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

An `nn.Dropout` is seen in the module. These are seen in one run of it (`Finding`), and from then on the modules that
call them are given masks from the seed (`Answers`), as dropouts are. Attention that drops computes all of its weights:
kernels that do not, draw their own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from shardwise.torch_private import SAFE_SOFTMAX, DropoutModule

_DROPOUT = (functional.dropout, torch.dropout)


class Finding(TorchFunctionMode):
    """Sees which modules drop at random by calling a function, in a run of a module in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[nn.Module] = []
        self.found: list[nn.Module] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Where the run is."""
        before = register_module_forward_pre_hook(lambda module, _: self._inside.append(module))
        after = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()
            self._inside.clear()

    def names(self, module: nn.Module) -> list[str]:
        """Those of the module's that do."""
        found = {id(each) for each in self.found}
        return [name for name, each in module.named_modules() if id(each) in found]

    def _leave(self) -> None:
        if self._inside:
            self._inside.pop()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._inside and _drops(func, args, kwargs) and not isinstance(self._inside[-1], DropoutModule):
            self.found.append(self._inside[-1])
        return func(*args, **kwargs)


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is functional.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if func in _DROPOUT:
        _, probability, is_training, _ = _dropout_arguments(*args, **kwargs)
        return bool(probability) and is_training
    return False


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of both, whose names differ."""
    return input, p, training if train is None else train, inplace


class Masks(Protocol):
    """What makes masks for the calls of one forward of one module. None: there are none for these numbers."""

    def scaled(self, given: Tensor, probability: float) -> Tensor | None:
        """What a tensor is to be multiplied by."""
        ...

    def of_weights(self, given: Tensor, probability: float) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The same for weights of attention by heads as in `given`, from the places of queries and of keys."""
        ...


class Answers(TorchFunctionMode):
    """Answers the functions that drop while one forward of a module runs. `attends`: attention is answered too."""

    def __init__(self, masks: Masks, *, attends: bool) -> None:
        super().__init__()
        self._masks, self._attends = masks, attends

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        answer: Tensor | None = None
        if func in _DROPOUT and _drops(func, args, kwargs):
            answer = self._drop(*_dropout_arguments(*args, **kwargs))
        elif self._attends and _drops(func, args, kwargs):
            answer = self._attend(*args, **kwargs)
        return func(*args, **kwargs) if answer is None else answer

    def _drop(self, given: Tensor, probability: float, _: bool, is_in_place: bool) -> Tensor | None:
        factors = self._masks.scaled(given, probability)
        if factors is None:
            return None
        return given.mul_(factors) if is_in_place else given * factors

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        factors = self._masks.of_weights(query, dropout_p)
        if factors is None:
            return None
        if enable_gqa:
            sharing = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(sharing, -3), value.repeat_interleave(sharing, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        queries, keys = (torch.arange(each.shape[-2], device=query.device) for each in (query, key))
        if is_causal:
            scores = scores.masked_fill(keys > queries[:, None], float("-inf"))
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        # A query that sees nothing has weights of 0, as in torch's own.
        weights = SAFE_SOFTMAX(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
        made: Tensor = (weights * factors(queries, keys)).to(value.dtype) @ value
        return made
