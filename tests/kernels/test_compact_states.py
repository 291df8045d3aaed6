"""AdamW with states of 16 and 8 bits: the kernel beside its definition, and what rounding keeps."""

import pytest
import torch

from shardwise.kernels.compact_states import (
    BLOCK,
    AdamWNumbers,
    adamw_step,
    code_book,
    decode,
    decoded,
    encode,
    make_moments,
    round_by_chance,
)

NUMBERS = AdamWNumbers(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)


def test_code_books_have_256_numbers_in_seven_decades() -> None:
    for signed in (True, False):
        book = code_book(signed=signed, device=torch.empty(0).device)
        assert len(set(book.tolist())) == 256
        assert torch.equal(book, book.sort().values)
        assert float(book[-1]) == 1.0
        assert float(book[book > 0].min()) == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_steps_as_its_definition(bits: int, dtype: torch.dtype) -> None:
    for shape in ((3,), (2, 700), (1025,), (0,)):
        start = torch.randn(shape).to(dtype)
        weights = [start.clone(), start.clone()]
        moments = [make_moments(start, bits=bits) for _ in weights]
        for step in range(1, 4):
            gradient = (torch.randn(shape) * torch.logspace(-4, 1, 700).repeat(2)[: start.shape[-1]]).to(dtype)
            for weight, kept, kernels in zip(weights, moments, (True, False), strict=True):
                adamw_step(weight, gradient, kept, NUMBERS._replace(step=step), kernels=kernels)
            if step == 1:  # Before anything was rounded.
                torch.testing.assert_close(*weights)
        assert float((weights[0] - weights[1]).norm()) <= 0.01 * float(start.norm())
        for one, other in zip(decoded(moments[0]), decoded(moments[1]), strict=True):
            # The last bit of a number decides its chance, and is not the same in both.
            assert float((one - other).norm()) <= 0.02 * float(other.norm())


@pytest.mark.parametrize("bits", [8, 16])
def test_numbers_that_both_compute_exactly_are_rounded_alike(bits: int) -> None:
    signs = torch.randint(0, 2, (3, 500)) * 2 - 1
    gradient = signs * 2.0 ** torch.randint(-9, 1, (3, 500))
    # A quarter and an eighth of a power of two, added to others of these: all have few bits.
    exact = NUMBERS._replace(beta1=0.75, beta2=0.875, lr=0.0)
    moments = [make_moments(gradient, bits=bits) for _ in range(2)]
    for kept, kernels in zip(moments, (True, False), strict=True):
        adamw_step(torch.zeros(3, 500), gradient, kept, exact, kernels=kernels)
    for one, other in zip(*moments, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_moment_of_8_bits_is_near_what_it_stands_for() -> None:
    numbers = torch.randn(3 * BLOCK + 7)
    codes, scale = encode(numbers, signed=True)
    assert (codes.dtype, scale.shape) == (torch.uint8, (4,))
    found = decode(codes, scale, signed=True)
    assert float((found - numbers).norm() / numbers.norm()) < 0.02
    again, _ = encode(found, signed=True)
    assert torch.equal(again, codes)


def test_second_moments_fall_by_chance_and_never_to_nothing() -> None:
    number = torch.full((4096,), 0.5)
    for step in range(1, 201):
        # Each is its own number: the chance of equal numbers is equal.
        number = round_by_chance(number * (1 - torch.rand(4096) * 2e-3), step).float()
    assert float(number.mean()) == pytest.approx(0.5 * 0.999**200, rel=0.01)
    small = torch.cat([torch.ones(1), torch.full((255,), 1e-12), torch.zeros(256)])
    codes, scale = encode(small, signed=False, step=3)
    found = decode(codes, scale, signed=False)
    assert bool((found[:256] > 0).all())
    assert not bool(found[256:].any())


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_no_number_stays_none(bits: int) -> None:
    for kernels in (True, False):
        weight = torch.zeros(600)
        kept, gradient = make_moments(weight, bits=bits), torch.ones(600)
        gradient[300] = torch.nan
        adamw_step(weight, gradient, kept, NUMBERS, kernels=kernels)
        assert weight.isnan().nonzero().tolist() == [[300]]
        for each in decoded(kept):
            assert bool(each[300].isnan())
            assert bool(each[:BLOCK].isfinite().all())
