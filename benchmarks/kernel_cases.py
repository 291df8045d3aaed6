"""The cases of `benchmarks/kernels.py`: sizes of real training, who computes them, and the bytes they must move."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels

BF16 = 2
#: Of a step of 4 x 4096 and of one of 16 x 4096: what begins and ends a kernel is a tenth of the smaller one's time.
TOKENS, MANY_TOKENS = 16_384, 65_536
WIDTH, INNER = 2048, 8192
HEADS, KEY_HEADS, DIM, LENGTH = 32, 8, 64, 4096
EXPERTS, CHOSEN = 128, 8


def number(*shape: int, gradient: bool = True, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_(gradient)


def cases(case: Callable[..., Any]) -> Iterator[Any]:
    for tokens, suffix in ((TOKENS, ""), (MANY_TOKENS, "_large")):
        yield from norms(case, tokens, suffix)
        yield rotary(case, tokens, suffix)
    yield gated(case)
    yield from losses(case)
    yield from experts(case)
    yield packed(case)


def who(ours: Callable[..., Any], plain: Callable[..., Any], liger: str | None, **options: Any) -> dict[str, Any]:
    found = {"ours": partial(ours, **options), "torch": plain, "compiled": torch.compile(plain, dynamic=False)}
    if liger is not None:
        try:
            from liger_kernel.transformers import functional

            found["liger"] = getattr(functional, liger)
        except (ImportError, AttributeError):
            pass
    return found


def norms(case: Callable[..., Any], tokens: int, suffix: str) -> Iterator[Any]:
    for rows, width in ((tokens, WIDTH), (tokens // 2, 2 * WIDTH)):
        size = rows * width * BF16
        inputs = partial(lambda t, w: [number(t, w), number(w)], rows, width)
        found = who(
            partial(kernels.rms_norm, eps=1e-5), partial(kernels.rms_norm, eps=1e-5, kernels=False), "liger_rms_norm"
        )
        if "liger" in found:
            found["liger"] = partial(lambda f, x, w: f(x, w, 1e-5), found["liger"])
        yield case(
            name=f"rms_norm_{width}{suffix}",
            shape=f"{rows} x {width}",
            inputs=inputs,
            functions=found,
            forward_bytes=2 * size,
            backward_bytes=3 * size,
            small=lambda: [number(1000, 2048), number(2048)],
        )
    size = tokens * WIDTH * BF16
    found = who(
        partial(kernels.add_rms_norm, eps=1e-5),
        partial(kernels.add_rms_norm, eps=1e-5, kernels=False),
        "liger_fused_add_rms_norm",
    )
    if "liger" in found:
        found["liger"] = partial(lambda f, x, r, w: f(x, r, w, 1e-5), found["liger"])
    yield case(
        name=f"add_rms_norm{suffix}",
        shape=f"{tokens} x {WIDTH}",
        inputs=lambda: [number(tokens, WIDTH), number(tokens, WIDTH), number(WIDTH)],
        functions=found,
        forward_bytes=4 * size,
        backward_bytes=4 * size,
        small=lambda: [number(1000, 2048), number(1000, 2048), number(2048)],
    )
    found = who(kernels.layer_norm, partial(kernels.layer_norm, kernels=False), "liger_layer_norm")
    if "liger" in found:
        found["liger"] = partial(lambda f, x, w, b: f(x, w, b, 1e-5), found["liger"])
    yield case(
        name=f"layer_norm{suffix}",
        shape=f"{tokens} x {WIDTH}",
        inputs=lambda: [number(tokens, WIDTH), number(WIDTH), number(WIDTH)],
        functions=found,
        forward_bytes=2 * size,
        backward_bytes=3 * size,
        small=lambda: [number(1000, 2048), number(2048), number(2048)],
    )


def rotary(case: Callable[..., Any], tokens: int, suffix: str) -> Any:
    batch = tokens // LENGTH

    def heads(length: int) -> list[Any]:
        made = [
            torch.randn(batch, length, num, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for num in (HEADS, KEY_HEADS)
        ]
        angles = torch.rand(1, length, DIM // 2, device="cuda") * 100
        return [*made, angles.cos(), angles.sin()]

    found = who(kernels.rotary, partial(kernels.rotary, kernels=False), "liger_rope")
    if "liger" in found:
        found["liger"] = partial(lambda f, q, k, c, s: f(q, k, c.repeat(1, 1, 2), s.repeat(1, 1, 2)), found["liger"])
    size = tokens * (HEADS + KEY_HEADS) * DIM * BF16
    return case(
        name=f"rotary{suffix}",
        shape=f"{batch} x {HEADS} and {KEY_HEADS} heads x {LENGTH} x {DIM}",
        inputs=lambda: heads(LENGTH),
        functions=found,
        forward_bytes=2 * size,
        backward_bytes=2 * size,
        small=lambda: heads(100),
    )


def gated(case: Callable[..., Any]) -> Any:
    size = TOKENS * INNER * BF16
    return case(
        name="gated",
        shape=f"{TOKENS} x {INNER}",
        inputs=lambda: [number(TOKENS, INNER), number(TOKENS, INNER)],
        functions=who(kernels.gated, partial(kernels.gated, kernels=False), "liger_swiglu"),
        forward_bytes=3 * size,
        backward_bytes=5 * size,
        small=lambda: [number(1000, 1001), number(1000, 1001)],
    )


def labels(tokens: int, words: int) -> Tensor:
    made = torch.randint(words, (tokens,), device="cuda")
    made[::10] = -100
    return made


def losses(case: Callable[..., Any]) -> Iterator[Any]:
    tokens, words = 4096, 131_072
    size = tokens * words * BF16
    # A tenth of the labels is ignored: those rows are not read, and their gradient is written.
    yield case(
        name="cross_entropy",
        shape=f"{tokens} x {words}",
        inputs=lambda: [number(tokens, words, scale=2.0), labels(tokens, words)],
        functions=who(kernels.cross_entropy, partial(kernels.cross_entropy, kernels=False), "liger_cross_entropy"),
        forward_bytes=size * 9 // 10,
        backward_bytes=size * 19 // 10,
        small=lambda: [number(500, 32_001, scale=2.0), labels(500, 32_001)],
    )
    tokens, width = 8192, 4096
    flop_seconds = 6 * tokens * width * words / 792e12
    found = who(
        kernels.linear_cross_entropy,
        partial(kernels.linear_cross_entropy, kernels=False),
        "liger_fused_linear_cross_entropy",
    )
    del found["compiled"]  # Whole logits in float32, forward and backward, and no other word for it.
    yield case(
        name="linear_cross_entropy",
        shape=f"{tokens} x {width} x {words}",
        inputs=lambda: [number(tokens, width), number(words, width, scale=0.02), labels(tokens, words)],
        functions=found,
        # Not bytes: three products at the speed of a large one, told as bytes at the limit's rate.
        forward_bytes=int(flop_seconds * 4.24e12),
        backward_bytes=0,
        small=lambda: [number(700, 1024), number(32_001, 1024, scale=0.02), labels(700, 32_001)],
    )


def experts(case: Callable[..., Any]) -> Iterator[Any]:
    yield case(
        name="route",
        shape=f"{TOKENS} x {EXPERTS}, {CHOSEN} chosen",
        inputs=lambda: [number(TOKENS, EXPERTS, dtype=torch.float32)],
        functions=who(
            partial(kernels.route, num_chosen=CHOSEN), partial(kernels.route, num_chosen=CHOSEN, kernels=False), None
        ),
        forward_bytes=TOKENS * (EXPERTS * 4 + CHOSEN * 12),
        backward_bytes=TOKENS * (EXPERTS * 8 + CHOSEN * 12),
        small=lambda: [number(1000, EXPERTS, dtype=torch.float32)],
    )
    chosen = torch.rand(TOKENS, EXPERTS, device="cuda").topk(CHOSEN).indices
    choices = TOKENS * CHOSEN
    order = kernels.make_order(chosen, EXPERTS)
    rows = choices * WIDTH * BF16
    yield case(
        name="permute",
        shape=f"{TOKENS} x {WIDTH} to {choices} rows",
        inputs=lambda: [number(TOKENS, WIDTH)],
        functions=who(
            partial(kernels.permute, order=order), partial(kernels.permute, order=order, kernels=False), None
        ),
        forward_bytes=rows + TOKENS * WIDTH * BF16,
        backward_bytes=rows + TOKENS * WIDTH * BF16,
        small=lambda: [number(TOKENS, 64)],
    )
    yield case(
        name="unpermute",
        shape=f"{choices} rows to {TOKENS} x {WIDTH}",
        inputs=lambda: [number(choices, WIDTH), number(TOKENS, CHOSEN, dtype=torch.float32)],
        functions=who(
            partial(kernels.unpermute, order=order), partial(kernels.unpermute, order=order, kernels=False), None
        ),
        forward_bytes=rows + TOKENS * WIDTH * BF16,
        backward_bytes=2 * rows + TOKENS * WIDTH * BF16,
        small=lambda: [number(choices, 64), number(TOKENS, CHOSEN, dtype=torch.float32)],
    )


def packed(case: Callable[..., Any]) -> Any:
    """Documents of 600 tokens on average in rows of 8192: no mask against a dense one."""
    from shardwise.nets.attention import attend, takes_sequences
    from shardwise.nets.mask import AttentionMask, causal_mask, find_starts, number_documents

    length, rows = 8192, 2

    def heads() -> list[Any]:
        ids = (torch.rand(rows, length, device="cuda") < 1 / 600).cumsum(1)
        made = [
            torch.randn(rows, length, num, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for num in (HEADS, KEY_HEADS, KEY_HEADS)
        ]
        return [*made, number_documents(ids)]

    def ours(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        assert takes_sequences(query.device, query.dtype, DIM)
        starts = find_starts(documents.shape, documents.device, documents)
        return attend(query, key, value, AttentionMask(None, documents, documents, None, starts), DIM**-0.5)

    def dense(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        mask = causal_mask(length, length, documents.device, documents=documents)
        return attend(query, key, value, AttentionMask(mask, documents, documents, None), DIM**-0.5)

    def whole(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        return attend(query, key, value, AttentionMask(None, documents, None, None), DIM**-0.5)

    return case(
        name="packed_attention",
        shape=f"{rows} x {HEADS} and {KEY_HEADS} heads x {length} x {DIM}, documents of 600",
        inputs=heads,
        functions={"ours": ours, "torch": dense, "unpacked": whole},
        forward_bytes=0,
        backward_bytes=0,
        small=heads,
    )


def variants() -> Iterator[tuple[str, ModuleType, list[dict[str, int]]]]:
    """For each kernel with settings of its own, its module and others to try."""
    from shardwise.kernels import cross_entropy_triton, experts_triton, gated_triton, norm_triton, rotary_triton

    norm = [
        {"A_WARP": warp, "STAGES": stages, "A_NUMBER": registers}
        for warp in (512, 1024)
        for stages in (1, 3, 4)
        for registers in (5, 7, 10, 15)
    ]
    for name in ("rms_norm_2048", "rms_norm_4096", "add_rms_norm", "layer_norm"):
        yield name, norm_triton, norm
    turns = [
        {"PAIRS": pairs, "TOKENS": tokens, "WARPS": warps}
        for pairs in (1024, 2048, 4096)
        for tokens in (1, 2, 4)
        for warps in (1, 2, 4)
    ]
    yield "rotary", rotary_triton, turns
    yield (
        "route",
        experts_triton,
        [{"SCORES": scores, "WARPS": warps} for scores in (256, 512, 1024) for warps in (2, 4, 8)],
    )
    yield "permute", experts_triton, [{"BLOCK": block} for block in (512, 1024, 2048, 4096)]
    blocks = [{"BLOCK": block, "WARPS": warps} for block in (1024, 2048, 4096) for warps in (4, 8)]
    yield "gated", gated_triton, blocks
    large = [{"BLOCK": block, "WARPS": warps} for block in (2048, 4096, 8192, 16_384) for warps in (4, 8, 16)]
    yield "cross_entropy", cross_entropy_triton, large
