"""Triton kernels as a user writes them. On a CPU they run in Triton's interpreter, chosen when they are made."""

# Kernels have no types, and whether Triton is installed would change what a type checker says.
# mypy: ignore-errors

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

triton = pytest.importorskip("triton", reason="no Triton for this machine: kernels are neither read nor run")
tl = pytest.importorskip("triton.language")


def interpreted(fn: Callable[..., None]) -> Any:
    """A kernel that the CPU runs. Other tests do not see the setting."""
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        return triton.jit(fn)


@interpreted
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * factor, mask=mask)


@interpreted
def accumulate(total_ptr, x_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(total_ptr + offsets, mask=mask)
    tl.store(total_ptr + offsets, total + tl.load(x_ptr + offsets, mask=mask), mask=mask)


@interpreted
def put(pointers, values, mask):
    tl.store(pointers, values, mask=mask)


@interpreted
def shift_through_another(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n - 1
    put(y_ptr + offsets, tl.load(x_ptr + offsets + 1, mask=mask), mask)


def unknown_function(pointer: Any) -> None:
    """Not a kernel: nobody knows what it does with a pointer."""


@triton.jit
def by_atomics(x_ptr, count_ptr, lock_ptr):
    tl.atomic_add(count_ptr, tl.load(x_ptr))
    tl.atomic_cas(lock_ptr, 0, 1)


@triton.jit
def by_block_pointers(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):  # noqa: N803
    source = tl.make_block_ptr(x_ptr, (n,), (stride,), (0,), (BLOCK,), (0,))
    target = tl.make_block_ptr(base=y_ptr, shape=(n,), strides=(1,), offsets=(0,), block_shape=(BLOCK,), order=(0,))
    for _ in range(0, n, BLOCK):
        tl.store(target, tl.load(source))
        source = tl.advance(source, (BLOCK,))
        target = tl.advance(target, (BLOCK,))


@triton.jit
def by_descriptors(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    source = tl.make_tensor_descriptor(x_ptr, [n], [1], [BLOCK])
    target = tl.make_tensor_descriptor(y_ptr, [n], [1], [BLOCK])
    target.store([0], source.load([0]))


@triton.jit
def swapped_in_a_loop(x_ptr, y_ptr, n):
    one, other = x_ptr, y_ptr
    for _ in range(n):
        tl.store(other, tl.load(one))
        one, other = other, one


@triton.jit
def chosen_by_a_branch(x_ptr, y_ptr, z_ptr, flag):
    if flag > 0:  # noqa: SIM108 - as kernels are written
        pointer = x_ptr
    else:
        pointer = y_ptr
    pointer += 4
    tl.store(z_ptr, tl.load(pointer))


@triton.jit
def reused_name(x_ptr, y_ptr):
    pointer = x_ptr + 1
    value = tl.load(pointer)
    pointer = y_ptr + 1
    tl.store(pointer, value)


@triton.jit
def gathered(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + tl.load(index_ptr + offsets)))


@triton.jit
def escaping(x_ptr, y_ptr):
    unknown_function(x_ptr)
    tl.store(y_ptr, 1.0)


@triton.jit
def stored_pointer(x_ptr, table_ptr):
    tl.store(table_ptr, x_ptr)


@triton.jit
def calling_itself(x_ptr, y_ptr, n):
    tl.store(y_ptr, tl.load(x_ptr))
    calling_itself(x_ptr, y_ptr, n - 1)


@triton.jit
def moved(pointer, offset):
    return pointer + offset


@triton.jit
def through_a_returned_pointer(x_ptr, y_ptr, unused_ptr):  # noqa: ARG001
    tl.store(moved(y_ptr, 2), tl.load(moved(offset=1, pointer=x_ptr)))


@triton.jit
def made_of_numbers(table_ptr, y_ptr):
    pointer = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr, tl.load(pointer))


@interpreted
def through_a_tuple(pointers, n):
    for offset in range(n):
        tl.store(pointers[1] + offset, tl.load(pointers[0] + offset))
