"""The kernels of `experts.py`."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001, SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

#: Columns of a row per iteration of a program.
BLOCK = 2048
#: Scores (tokens x experts) per program, and its warps: a multiprocessor has room for more warps than programs.
#: `benchmarks/kernels.py --sweep` tries others.
SCORES, WARPS = 512, 4


@triton.jit
def _scores(logits, mask, IS_SIGMOID: tl.constexpr):
    if IS_SIGMOID:
        return tl.where(mask, tl.sigmoid(logits), 0.0)
    shifted = tl.exp(logits - tl.max(logits, 1)[:, None])
    shifted = tl.where(mask, shifted, 0.0)
    return shifted / tl.sum(shifted, 1)[:, None]


@triton.jit
def _route(
    logits, correction, weights, experts, stride, tokens, num_experts, scale,
    CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    is_expert = expert < num_experts
    # Tokens past the end are rows of equal scores: they cause no NaN, and are not written.
    logit = tl.load(logits + token * stride + expert, mask=(token < tokens) & is_expert, other=0.0).to(tl.float32)
    logit = tl.where(is_expert, logit, -float("inf"))
    scores = _scores(logit, is_expert, IS_SIGMOID)
    ranked = scores
    if HAS_CORRECTION:
        ranked += tl.load(correction + expert, mask=is_expert, other=0.0).to(tl.float32)
    # NaN ranks highest, as in torch. All others are clamped to finite, because -inf marks those already taken.
    ranked = tl.where(ranked != ranked, 3.4e38, tl.minimum(tl.maximum(ranked, -3.4e38), 3.4e38))
    ranked = tl.where(is_expert, ranked, -float("inf"))
    slot = tl.arange(0, CHOSEN_BLOCK)[None, :]
    best = tl.zeros((TOKENS, CHOSEN_BLOCK), tl.int32)
    found = tl.zeros((TOKENS, CHOSEN_BLOCK), tl.float32)
    for nth in tl.static_range(CHOSEN):
        highest = tl.max(ranked, 1)[:, None]
        at = tl.min(tl.where(ranked == highest, expert, EXPERTS - 1), 1)[:, None]
        is_at = expert == at
        best = tl.where(slot == nth, at, best)
        found = tl.where(slot == nth, tl.sum(tl.where(is_at, scores, 0.0), 1)[:, None], found)
        ranked = tl.where(is_at, -float("inf"), ranked)
    if NORMALISED:
        found = found / (tl.sum(found, 1)[:, None] + 1e-20)
    mask = (token < tokens) & (slot < CHOSEN)
    tl.store(weights + token * CHOSEN + slot, found * scale, mask=mask)
    tl.store(experts + token * CHOSEN + slot, best.to(tl.int64), mask=mask)


@triton.jit
def _route_backward(
    gradient, logits, experts, out, stride, tokens, num_experts, scale,
    CHOSEN: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    is_token = token < tokens
    expert = tl.arange(0, EXPERTS)[None, :]
    is_expert = expert < num_experts
    logit = tl.load(logits + token * stride + expert, mask=is_token & is_expert, other=0.0).to(tl.float32)
    logit = tl.where(is_expert, logit, -float("inf"))
    scores = _scores(logit, is_expert, IS_SIGMOID)
    # Scatter the gradients of the chosen to their experts.
    is_chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
    d = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for nth in tl.static_range(CHOSEN):
        at = tl.load(experts + token * CHOSEN + nth, mask=is_token, other=0).to(tl.int32)
        value = tl.load(gradient + token * CHOSEN + nth, mask=is_token, other=0.0).to(tl.float32) * scale
        d = tl.where(expert == at, value, d)
        is_chosen = tl.where(expert == at, 1, is_chosen)
    if NORMALISED:
        chosen = tl.where(is_chosen == 1, scores, 0.0)
        total = tl.sum(chosen, 1)[:, None] + 1e-20
        d = tl.where(is_chosen == 1, (d - tl.sum(d * chosen, 1)[:, None] / total) / total, 0.0)
    if IS_SIGMOID:
        d = d * scores * (1.0 - scores)
    else:
        d = scores * (d - tl.sum(d * scores, 1)[:, None])
    tl.store(out + token * num_experts + expert, d.to(out.dtype.element_ty), mask=is_token & is_expert)


@triton.jit
def _copy(x, rows, out, stride, num_rows, n, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token reads the token once, wherever its rows are. By row, it would be read once per choice.
    blocks = tl.cdiv(n, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * stride + column, mask=column < n)
    for nth in tl.static_range(CHOSEN):
        row = tl.load(rows + token * CHOSEN + nth).to(tl.int64)
        end = tl.where(row < num_rows, n, 0)  # A dropped choice has no row.
        tl.store(out + row * n + column, value, mask=column < end)


@triton.jit
def _sum(x, weights, rows, out, num_rows, n, CHOSEN: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for nth in tl.static_range(CHOSEN):
        row = tl.load(rows + token * CHOSEN + nth).to(tl.int64)
        # A dropped choice has no row: read nothing.
        end = tl.where(row < num_rows, n, 0)
        value = tl.load(x + row * n + column, mask=column < end, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights + token * CHOSEN + nth).to(tl.float32)
        total += value
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), mask=column < n)


@triton.jit
def _spread(gradient, outputs, weights, rows, d_outputs, d_weights, stride, num_rows, n, chosen, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + choice).to(tl.int64)
    weight = tl.load(weights + choice).to(tl.float32)
    end = tl.where(row < num_rows, n, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, n, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < end
        d = tl.load(gradient + (choice // chosen) * stride + column, mask=mask, other=0.0).to(tl.float32)
        total += d * tl.load(outputs + row * n + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_outputs + row * n + column, (d * weight).to(d_outputs.dtype.element_ty), mask=mask)
    tl.store(d_weights + choice, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def _tile(num_experts: int) -> dict[str, int]:
    experts = triton.next_power_of_2(num_experts)
    return {"TOKENS": max(1, SCORES // experts), "EXPERTS": experts, "num_warps": WARPS}


def _lying(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()


@custom_op("shardwise::choose_experts", mutates_args=())
def choose_experts(
    logits: Tensor, correction: Tensor | None, num_chosen: int, is_sigmoid: bool, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    logits = _lying(logits)
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, num_chosen), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, num_chosen), dtype=torch.int64, device=logits.device)
    if tokens:
        tile = _tile(num_experts)
        _route[(triton.cdiv(tokens, tile["TOKENS"]),)](
            logits, correction, weights, experts, logits.stride(0), tokens, num_experts, scale,
            CHOSEN=num_chosen, CHOSEN_BLOCK=triton.next_power_of_2(num_chosen), IS_SIGMOID=is_sigmoid,
            NORMALISED=normalised, HAS_CORRECTION=correction is not None, **tile,
        )  # fmt: skip
    return weights, experts


@choose_experts.register_fake
def _(logits, correction, num_chosen, is_sigmoid, normalised, scale):
    shape = (logits.shape[0], num_chosen)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@custom_op("shardwise::choose_experts_backward", mutates_args=())
def choose_experts_backward(
    gradient: Tensor, logits: Tensor, experts: Tensor, is_sigmoid: bool, normalised: bool, scale: float
) -> Tensor:
    logits = _lying(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tokens, num_experts = logits.shape
    if tokens:
        tile = _tile(num_experts)
        _route_backward[(triton.cdiv(tokens, tile["TOKENS"]),)](
            gradient.contiguous(), logits, experts, out, logits.stride(0), tokens, num_experts, scale,
            CHOSEN=experts.shape[1], IS_SIGMOID=is_sigmoid, NORMALISED=normalised, **tile,
        )  # fmt: skip
    return out


@choose_experts_backward.register_fake
def _(gradient, logits, experts, is_sigmoid, normalised, scale):
    return logits.new_empty(logits.shape)


@custom_op("shardwise::copy_rows", mutates_args=())
def copy_rows(x: Tensor, rows: Tensor, num_chosen: int, num_rows: int) -> Tensor:
    """Copy each token to all of its rows; there are `num_rows` in all."""
    x = _lying(x)
    n = x.shape[1]
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(n))
        _copy[(x.shape[0] * triton.cdiv(n, block),)](
            x, rows, out, x.stride(0), num_rows, n, CHOSEN=num_chosen, BLOCK=block
        )
    return out


@copy_rows.register_fake
def _(x, rows, num_chosen, num_rows):
    return x.new_empty((num_rows, x.shape[1]))


@custom_op("shardwise::sum_rows", mutates_args=())
def sum_rows(x: Tensor, weights: Tensor | None, rows: Tensor, num_chosen: int) -> Tensor:
    """Return for each token the sum of its rows, times their weights."""
    x = x.contiguous()
    tokens, n = rows.numel() // num_chosen, x.shape[1]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(n))
        weights = None if weights is None else weights.contiguous()
        _sum[(tokens * triton.cdiv(n, block),)](
            x, weights, rows, out, x.shape[0], n, CHOSEN=num_chosen, HAS_WEIGHTS=weights is not None, BLOCK=block
        )
    return out


@sum_rows.register_fake
def _(x, weights, rows, num_chosen):
    return x.new_empty((rows.numel() // num_chosen, x.shape[1]))


@custom_op("shardwise::spread_rows", mutates_args=())
def spread_rows(gradient: Tensor, outputs: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `sum_rows`."""
    gradient, outputs = _lying(gradient), outputs.contiguous()
    d_outputs = torch.empty(outputs.shape, dtype=outputs.dtype, device=outputs.device)
    d_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    if rows.numel():
        n = outputs.shape[1]
        _spread[(rows.numel(),)](
            gradient, outputs, weights.contiguous(), rows, d_outputs, d_weights, gradient.stride(0),
            outputs.shape[0], n, weights.shape[1], BLOCK=min(BLOCK, triton.next_power_of_2(n)),
        )  # fmt: skip
    return d_outputs, d_weights


@spread_rows.register_fake
def _(gradient, outputs, weights, rows):
    return outputs.new_empty(outputs.shape), weights.new_empty(weights.shape)
