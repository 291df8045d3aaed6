"""Attention of some queries to some keys, with the logarithm of each query's sum of weights; and its gradients.

Results over different keys can be joined afterwards, each weighed by its sum. A backward is given the output and the
sums over all keys, and gives what these keys contribute. All kernels mean the same:

    CPU     torch's flash kernel for CPUs        where queries and values have one size of head
    CUDA    flash                                16 bits, and no mask
            memory-efficient                     32 bits, or a mask
    any     plain matmuls                        all else: capped logits, odd sizes of heads, weights that are dropped
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

#: Of queries, keys and values.
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """From products to logits: times `scale`, then squeezed between plus and minus `cap` where there is one."""

    scale: float
    cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBlock:
    """Queries, keys and values: each [batch, heads, tokens, size of a head]. Several heads of queries may share one of
    keys. `bias` is added to the logits: [batch or 1, 1, queries, keys]. With `causal` queries and keys are the same
    tokens, and each sees those up to itself. Weights are multiplied by `factors` where some are dropped: [batch, heads,
    queries, keys]. Sums are of all weights."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    logits: LogitScaling
    factors: Tensor | None = None

    @property
    def sharing(self) -> int:
        """How many heads of queries share one of keys."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels that want as many heads of keys as of queries."""
        if self.sharing == 1:
            return self.query, self.key, self.value
        return self.query, self.key.repeat_interleave(self.sharing, 1), self.value.repeat_interleave(self.sharing, 1)

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> Gradients:
        """What such a kernel gives as gradients, summed over the heads that share."""
        if self.sharing == 1:
            return query, key, value
        num_heads = self.key.shape[1]
        return query, _grouped(key, num_heads).sum(2), _grouped(value, num_heads).sum(2)


def kernel_for(block: AttentionBlock) -> "Plain":
    """The fastest kernel that can do it."""
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
    """What sums of this type are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def least_of(dtype: torch.dtype) -> float:
    """What is added to a logit so that its weight is 0. It is finite: a query that sees nothing is no NaN."""
    return max(-1e30, torch.finfo(dtype).min)


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to logits for a mask. Rows lie at multiples of 16 bytes, as kernels on CUDA want."""
    width = mask.shape[-1]
    bias = torch.zeros((*mask.shape[:-1], width + -width % 8), dtype=dtype, device=mask.device)[..., :width]
    return bias.masked_fill_(~mask, least_of(dtype))


class Plain:
    """The definition, which other kernels keep to. It holds all logits at once, in float32 or better."""

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """The output, and the logarithms of the sums: [batch, heads, queries]."""
        scores, _ = self._scores(block)
        sums = scores.logsumexp(-1)
        weights = self._dropped((scores - sums[..., None]).exp(), block)
        out = weights @ _wide(block.value)[:, :, None]
        return out.flatten(1, 2).to(block.query.dtype), sums.flatten(1, 2)

    def backward(self, block: AttentionBlock, given: Tensor, out: Tensor, sums: Tensor) -> Gradients:
        """From the gradient of the output over all keys, and that output and its sums."""
        grouped_query, grouped_given, grouped_out, grouped_sums = (
            _grouped(each, block.key.shape[1]) for each in (block.query, given, out, sums)
        )
        scores, slope = self._scores(block)
        weights = (scores - grouped_sums[..., None]).exp()
        # The gradient of a logit: what its weight is wanted for, less the mean of that over all keys.
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
        """Logits as [batch, heads of keys, heads that share, queries, keys]; and their slope, where they are capped."""
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
            # In 16 bits the kernel takes it for granted that the output lies as it writes it: heads beside each other.
            out.transpose(1, 2).contiguous().transpose(1, 2),
            torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)),  # They are read 32 at a time.
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
    """Heads of queries beside those that share keys with them, in a wide type."""
    return _wide(tensor).reshape(tensor.shape[0], num_heads, -1, *tensor.shape[2:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_type(tensor.dtype))
