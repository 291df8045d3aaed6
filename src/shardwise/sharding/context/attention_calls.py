"""Calls of torch's attention in a module, seen and answered, whichever way the module has imported it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.errors import ShardwiseError
from shardwise.sharding.context.mask import Mask
from shardwise.torch_private import FUSED_ATTENTION_CALLS

#: From queries, keys and values: what they see, the scale of logits and their cap, how many weights are dropped; to the
#: output.
Attend = Callable[[Tensor, Tensor, Tensor, Mask, float | None, float | None, float], Tensor]

_WHOLE = (
    functional.multi_head_attention_forward,
    *FUSED_ATTENTION_CALLS,
)
_SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax)


class AttentionCalls(TorchFunctionMode):
    """Gives each call of `scaled_dot_product_attention` to `attend`. `masks` is what a mask means, if calls have one.

    Attention that is computed in another way would see this rank's tokens alone, and is refused where it is noticed.
    """

    def __init__(self, attend: Attend, num_tokens: int, masks: Mask | None) -> None:
        super().__init__()
        self._attend, self._num_tokens, self._masks = attend, num_tokens, masks

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._answer(*args, **kwargs)
        if func in _WHOLE:
            raise ShardwiseError(
                "nn.MultiheadAttention computes attention within itself, where it gets no keys of other ranks",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        if func in _SOFTMAX and self._is_of_tokens(args[0] if args else kwargs["input"]):
            raise ShardwiseError(
                f"a softmax over {self._num_tokens} x {self._num_tokens} of this rank's tokens looks like attention"
                " computed by hand, which sees no other rank's",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        return func(*args, **kwargs)

    def _is_of_tokens(self, scores: Tensor) -> bool:
        return scores.dim() > 2 and scores.shape[-2:] == (self._num_tokens, self._num_tokens)

    def _answer(
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
    ) -> Tensor:
        del enable_gqa
        mask = Mask(causal=is_causal)
        if attn_mask is not None:
            if self._masks is None:
                raise ShardwiseError(
                    f"attention was called with a mask, {list(attn_mask.shape)}, which is of this rank's tokens alone",
                    remedy="is_causal=True in the call, or masks=Mask(causal=True, ...) to say what its masks mean",
                )
            mask = self._masks
        return self._attend(query, key, value, mask, scale, None, dropout_p)
