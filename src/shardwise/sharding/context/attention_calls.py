"""Intercept a module's calls of torch's attention, however the module imported it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.errors import ShardwiseError
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.dropout import AttentionArguments
from shardwise.torch_private import FUSED_ATTENTION_CALLS

#: Computes attention from queries, keys, values, the mask, the scale of logits, their cap and the dropout probability.
Attend = Callable[[Tensor, Tensor, Tensor, Mask, float | None, float | None, float], Tensor]

_WHOLE = (functional.multi_head_attention_forward, *FUSED_ATTENTION_CALLS)
_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)


class AttentionCalls(TorchFunctionMode):
    """Routes each call of `scaled_dot_product_attention` to `attend`. `masks` is the meaning of masks in calls.

    Attention computed in any other way would see only this rank's tokens. `is_strict` refuses operations that look like
    it; it is for modules that no trial has run.
    """

    def __init__(self, attend: Attend, num_tokens: int, masks: Mask | None, *, is_strict: bool = True) -> None:
        super().__init__()
        self._attend, self._num_tokens, self._masks, self._is_strict = attend, num_tokens, masks, is_strict

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._answer(AttentionArguments(*args, **kwargs))
        if func in _WHOLE:
            raise ShardwiseError(
                "nn.MultiheadAttention computes attention internally, without the keys of other ranks",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        scores = (args[0] if args else kwargs["input"]) if func in _SOFTMAX and self._is_strict else None
        if scores is not None and scores.dim() > 2 and scores.shape[-2:] == (self._num_tokens, self._num_tokens):
            raise ShardwiseError(
                f"a softmax over {self._num_tokens} x {self._num_tokens} of this rank's tokens looks like"
                " hand-written attention, which does not include the tokens of other ranks",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        return func(*args, **kwargs)

    def _answer(self, given: AttentionArguments) -> Tensor:
        mask = Mask(causal=given.is_causal)
        if given.attn_mask is not None:
            if self._masks is None:
                raise ShardwiseError(
                    f"attention was called with a mask, {list(given.attn_mask.shape)}, which is of this rank's tokens"
                    " alone",
                    remedy="is_causal=True in the call, or masks=Mask(causal=True, ...) to say what its masks mean",
                )
            mask = self._masks
        return self._attend(given.query, given.key, given.value, mask, given.scale, None, given.dropout_p)
