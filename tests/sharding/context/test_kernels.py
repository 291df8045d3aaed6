"""All kernels mean the same, forward and backward, over all keys at once or a part after the other."""

import pytest
import torch
from torch import Tensor

from shardwise.sharding.context.kernels import (
    AttentionBlock,
    Efficient,
    Flash,
    FlashOnCpu,
    LogitScaling,
    Plain,
    bias_of,
    kernel_for,
)
from shardwise.sharding.context.ring import OnlineSoftmax

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = [
    pytest.param(FlashOnCpu(), torch.float32, "cpu", id="cpu-float32"),
    pytest.param(FlashOnCpu(), torch.bfloat16, "cpu", id="cpu-bfloat16"),
    pytest.param(Plain(), torch.float32, "cpu", id="plain-float32"),
    pytest.param(Plain(), torch.float32, "cuda", id="plain-cuda", marks=on_cuda),
    pytest.param(Flash(), torch.bfloat16, "cuda", id="flash-bfloat16", marks=on_cuda),
    pytest.param(Flash(), torch.float16, "cuda", id="flash-float16", marks=on_cuda),
    pytest.param(Efficient(), torch.float32, "cuda", id="efficient-float32", marks=on_cuda),
    pytest.param(Efficient(), torch.bfloat16, "cuda", id="efficient-bfloat16", marks=on_cuda),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def blocks(dtype: torch.dtype, device: str, key_heads: int, see: str) -> list[AttentionBlock]:
    """One block over 40 keys, or two that have them between them."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 40, 16, generator=generator).to(device, dtype)
    key, value = (torch.randn(2, key_heads, 40, 16, generator=generator).to(device, dtype) for _ in range(2))
    cuts = [slice(0, 24), slice(24, 40)] if see in ("parts", "masked parts") else [slice(None)]
    mask = torch.rand(2, 1, 40, 40, generator=generator).to(device) < 0.5
    mask[..., 0] = True  # In the first part all see something; in the second some see nothing.
    mask[:, :, 5, 24:] = False
    made = []
    for cut in cuts:
        bias = bias_of(mask[..., cut], dtype) if "masked" in see else None
        made.append(
            AttentionBlock(
                query=query,
                key=key[:, :, cut],
                value=value[:, :, cut],
                bias=bias,
                causal=see == "causal",
                logits=LogitScaling(scale=0.25),
            )
        )
    return made


def attention_of(kernel: Plain, parts: list[AttentionBlock]) -> list[Tensor]:
    """The output and the gradients of a sum of all of it."""
    whole = OnlineSoftmax(parts[0].query, parts[0].value.shape[-1])
    for part in parts:
        whole.add(slice(None), *kernel.forward(part))
    out, sums = whole.finish(hides=False)
    given = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    found = [kernel.backward(part, given, out, sums) for part in parts]
    grad_query = sum((each[0].float() for each in found), torch.zeros((), device=out.device))
    return [out, grad_query, *(torch.cat([each[number] for each in found], 2) for number in (1, 2))]


@pytest.mark.parametrize(("kernel", "dtype", "device"), KERNELS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("see", ["all", "causal", "parts", "masked", "masked parts"])
def test_a_kernel_gives_what_the_definition_gives(
    kernel: Plain, dtype: torch.dtype, device: str, key_heads: int, see: str
) -> None:
    if isinstance(kernel, Flash) and "masked" in see:
        return  # It takes no mask, and is not chosen for one.
    found = attention_of(kernel, blocks(dtype, device, key_heads, see))
    together = {"parts": "all", "masked parts": "masked"}.get(see, see)
    [block] = blocks(dtype, device, key_heads, together)
    exact = AttentionBlock(
        query=block.query.double(),
        key=block.key.double(),
        value=block.value.double(),
        bias=block.bias,
        causal=block.causal,
        logits=block.logits,
    )
    for each, wanted in zip(found, attention_of(Plain(), [exact]), strict=True):
        error = (each.double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype]


def test_the_plain_kernel_is_what_autograd_differentiates() -> None:
    [block] = blocks(torch.float64, "cpu", 2, "causal")
    query, key, value = (each.clone().requires_grad_() for each in (block.query, block.key, block.value))
    wide = AttentionBlock(
        query=query, key=key, value=value, bias=None, causal=True, logits=LogitScaling(scale=0.25, cap=1.5)
    )
    out, sums = Plain().forward(wide)
    given = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    by_autograd = torch.autograd.grad(out, (query, key, value), given)
    with torch.no_grad():
        by_hand = Plain().backward(wide, given, out, sums)
    for found, wanted in zip(by_hand, by_autograd, strict=True):
        torch.testing.assert_close(found, wanted)


def test_kernels_are_chosen_by_what_they_can_do() -> None:
    [block] = blocks(torch.float32, "cpu", 2, "all")
    assert isinstance(kernel_for(block), FlashOnCpu)
    narrow = AttentionBlock(
        query=block.query, key=block.key, value=block.value[..., :8], bias=None, causal=False, logits=block.logits
    )
    assert isinstance(kernel_for(narrow), Plain)


@on_cuda
@pytest.mark.parametrize(
    ("dtype", "see", "kind"),
    [(torch.bfloat16, "causal", Flash), (torch.bfloat16, "masked", Efficient), (torch.float32, "all", Efficient)],
)
def test_kernels_on_a_gpu_are_chosen_by_type_and_mask(dtype: torch.dtype, see: str, kind: type) -> None:
    assert isinstance(kernel_for(blocks(dtype, "cuda", 2, see)[0]), kind)
