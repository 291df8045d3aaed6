"""A kernel held against its definition: outputs and gradients of the same random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: One step of the type, relative to its number.
STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def outputs_of(function: Callable[..., Any], given: Sequence[Any]) -> list[Tensor]:
    """What a function gives, and the gradients of those of its tensors that want one, for random incoming ones."""
    wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    made = function(*given)
    outputs = [each for each in (made if isinstance(made, tuple) else (made,)) if isinstance(each, Tensor)]
    floats = [each for each in outputs if each.is_floating_point() and each.requires_grad]
    generator = torch.Generator("cpu").manual_seed(7)
    incoming = [torch.randn(each.shape, generator=generator, device="cpu").to(each) for each in floats]
    gradients: Any = torch.autograd.grad(floats, wanted, incoming, allow_unused=True) if floats and wanted else ()
    return [each.detach() for each in (*outputs, *gradients) if each is not None]


def in_float32(each: Any) -> Any:
    if not isinstance(each, Tensor) or not each.is_floating_point():
        return each
    return each.detach().float().requires_grad_(each.requires_grad)


def assert_alike(function: Callable[..., Any], given: Sequence[Any], **options: Any) -> None:
    """`function(*given, kernels=True)` must be no further from the numbers of float32 than its definition is."""
    mine = outputs_of(lambda *args: function(*args, **options, kernels=True), given)
    plain = outputs_of(lambda *args: function(*args, **options, kernels=False), given)
    exact = outputs_of(lambda *args: function(*args, **options, kernels=False), [in_float32(each) for each in given])
    step = STEP[next(each.dtype for each in given if isinstance(each, Tensor) and each.is_floating_point())]
    assert len(mine) == len(plain)
    for one, other, reference in zip(mine, plain, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if not one.is_floating_point():
            assert torch.equal(one, other)
            continue
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.equal(one.isnan(), other.isnan())
        is_number = other.isfinite() & reference.isfinite()
        one, other, reference = (torch.where(is_number, each, 0).double() for each in (one, other, reference))
        allowed = 1.5 * (other - reference).norm() + 8 * step * reference.norm() + 1e-6
        assert (one - reference).norm() <= allowed, f"{(one - reference).norm():.3g} > {allowed:.3g}"


def random_of(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(gradient)
