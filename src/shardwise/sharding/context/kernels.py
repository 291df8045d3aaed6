"""Attention of some queries to some keys: the output, the log-sum-exp of each query's logits, and the gradients.

Results over different keys can be merged afterwards by their log-sum-exp. A backward takes the output and log-sum-exp
over all keys, and returns the contribution of these keys to the gradients. All kernels compute the same function:

    CPU     torch's flash kernel for CPUs        where queries and values have the same head size
    CUDA    flash                                16 bits, and no mask
            memory-efficient                     32 bits, or a mask
    any     plain matmuls                        all else: capped logits, odd head sizes, dropout of weights
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.torch_private import (
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    FLASH_ON_CPU,
    FLASH_ON_CPU_BACKWARD,
)

#: The gradients of queries, keys and values.
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """Logits from query-key products: times `scale`, then soft-capped by tanh to (-`cap`, `cap`) if there is a cap."""

    scale: float
    cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBlock:
    """Queries, keys and values, each [batch, heads, tokens, head size]. Several query heads may share one key head.
    `bias`, [batch or 1, 1, queries, keys], is added to the logits. With `causal`, queries and keys are the same tokens,
    and each sees those up to itself. Under dropout, weights are multiplied by `factors`, [batch, heads, queries, keys].
    The log-sum-exp is of all weights, before dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    logits: LogitScaling
    factors: Tensor | None = None

    @property
    def sharing(self) -> int:
        """How many query heads share one key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value for kernels that need as many key heads as query heads."""
        if self.sharing == 1:
            return self.query, self.key, self.value
        return self.query, self.key.repeat_interleave(self.sharing, 1), self.value.repeat_interleave(self.sharing, 1)

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> Gradients:
        """Sum the key and value gradients of such a kernel over the query heads that share a key head."""
        if self.sharing == 1:
            return query, key, value
        num_heads = self.key.shape[1]
        return query, _grouped(key, num_heads).sum(2), _grouped(value, num_heads).sum(2)


def kernel_for(block: AttentionBlock) -> "Plain":
    """Return the fastest kernel that supports a block."""
    query_dim, value_dim, dtype = block.query.shape[-1], block.value.shape[-1], block.query.dtype
    if block.logits.cap is not None or block.factors is not None:
        return Plain()
    if block.query.device.type == "cpu":
        return FlashOnCpu() if query_dim == value_dim else Plain()
    if block.query.device.type != "cuda" or dtype is torch.float64 or query_dim % 8 or value_dim % 8:
        return Plain()
    can_flash = dtype is not torch.float32 and query_dim == value_dim <= 256 and block.bias is None
    return Flash() if can_flash else Efficient()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to accumulate values of this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def least_of(dtype: torch.dtype) -> float:
    """Return the bias that makes a weight 0. It is finite, so that a fully masked query gives no NaN."""
    return max(-1e30, torch.finfo(dtype).min)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias for a mask. Rows begin at multiples of 16 bytes, as CUDA kernels require."""
    width = mask.shape[-1]
    bias = torch.zeros((*mask.shape[:-1], width + -width % 8), dtype=dtype, device=mask.device)[..., :width]
    return bias.masked_fill_(~mask, least_of(dtype))


class Plain:
    """The reference definition for the other kernels. It holds all logits at once, in float32 or better."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of the logits, [batch, heads, queries]."""
        scores, _ = self._scores(block)
        sums = scores.logsumexp(-1)
        weights = self._dropped((scores - sums[..., None]).exp(), block)
        out = weights @ _wide(block.value)[:, :, None]
        return out.flatten(1, 2).to(block.query.dtype), sums.flatten(1, 2)

    def backward(self, block: AttentionBlock, given: Tensor, out: Tensor, sums: Tensor) -> Gradients:
        """Return gradients, given the output over all keys, its log-sum-exp (`sums`) and its gradient (`given`)."""
        grouped_query, grouped_given, grouped_out, grouped_sums = (
            _grouped(each, block.key.shape[1]) for each in (block.query, given, out, sums)
        )
        scores, slope = self._scores(block)
        weights = (scores - grouped_sums[..., None]).exp()
        # The gradient of a logit: its weight times (gradient of the weight less its weighted mean over all keys).
        mean = (grouped_given * grouped_out).sum(-1, keepdim=True)
        useful = self._dropped(grouped_given @ _wide(block.value)[:, :, None].mT, block)
        wanted = weights * (useful - mean) * block.logits.scale
        if slope is not None:
            wanted = wanted * slope
        grad_query = (wanted @ _wide(block.key)[:, :, None]).flatten(1, 2)
        return grad_query, (wanted.mT @ grouped_query).sum(2), (self._dropped(weights, block).mT @ grouped_given).sum(2)

    def _dropped(self, weights: Tensor, block: AttentionBlock) -> Tensor:
        return weights if block.factors is None else weights * _grouped(block.factors, block.key.shape[1])

    def _scores(self, block: AttentionBlock) -> tuple[Tensor, Tensor | None]:
        """Return logits [batch, key heads, sharing heads, queries, keys], and the derivative of the cap if any."""
        grouped = _grouped(block.query, block.key.shape[1])
        scores, slope = grouped @ _wide(block.key)[:, :, None].mT * block.logits.scale, None
        if block.logits.cap is not None:
            bent = torch.tanh(scores / block.logits.cap)
            scores, slope = bent * block.logits.cap, 1 - bent * bent
        if block.bias is not None:
            scores = scores + block.bias[:, :, None].to(scores.dtype)
        if block.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, least_of(block.query.dtype))
        return scores, slope


class FlashOnCpu(Plain):
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, sums = FLASH_ON_CPU(*block.operands, 0.0, block.causal, attn_mask=block.bias, scale=block.logits.scale)
        return out, sums

    def backward(self, block: AttentionBlock, given: Tensor, out: Tensor, sums: Tensor) -> Gradients:
        made = FLASH_ON_CPU_BACKWARD(
            given, *block.operands, out, sums, 0.0, block.causal, attn_mask=block.bias, scale=block.logits.scale
        )
        return block.gradients(*made)


class Flash(Plain):
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        assert block.bias is None, "the flash kernel takes no mask"
        made = FLASH(*block.operands, 0.0, block.causal, scale=block.logits.scale)
        return made[0], made[1]

    def backward(self, block: AttentionBlock, given: Tensor, out: Tensor, sums: Tensor) -> Gradients:
        lengths = block.query.shape[2], block.key.shape[2]
        rng_state = torch.zeros(2, dtype=torch.uint64, device=given.device)  # Nothing is dropped, so nothing is drawn.
        made = FLASH_BACKWARD(
            given,
            *block.operands,
            out,
            sums.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            block.causal,
            rng_state,
            rng_state,
            scale=block.logits.scale,
        )
        return block.gradients(*made)


class Efficient(Plain):
    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out, sums, _, _ = EFFICIENT_ATTENTION(
            *block.operands, self._bias(block), True, 0.0, block.causal, scale=block.logits.scale
        )
        return out, sums[..., : block.query.shape[2]]

    def backward(self, block: AttentionBlock, given: Tensor, out: Tensor, sums: Tensor) -> Gradients:
        rng_state = torch.zeros((), dtype=torch.int64, device=given.device)  # Nothing is dropped, so nothing is drawn.
        made = EFFICIENT_ATTENTION_BACKWARD(
            given,
            *block.operands,
            self._bias(block),
            # In 16 bits the kernel assumes the output has the layout that it writes: [batch, tokens, heads, size].
            out.transpose(1, 2).contiguous().transpose(1, 2),
            torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)),  # The kernel reads 32 at a time.
            rng_state,
            rng_state,
            0.0,
            (True, True, True, False),
            block.causal,
            scale=block.logits.scale,
        )
        return block.gradients(*made[:3])

    def _bias(self, block: AttentionBlock) -> Tensor | None:
        return None if block.bias is None else block.bias.expand(*block.query.shape[:2], -1, -1)


def _grouped(tensor: Tensor, num_heads: int) -> Tensor:
    """Group query heads by the key head that they share, [batch, key heads, sharing heads, ...], in a wide dtype."""
    return _wide(tensor).reshape(tensor.shape[0], num_heads, -1, *tensor.shape[2:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_type(tensor.dtype))
