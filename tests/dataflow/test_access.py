"""What a Triton kernel reads and writes is found in its source; what cannot be followed is taken to be both."""

from typing import Any

import pytest

from shardwise.dataflow.access import Access, find_accesses
from tests.dataflow import kernels

READ, WRITTEN, BOTH = Access(True, False), Access(False, True), Access(True, True)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kernels.scale, {"x_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.accumulate, {"total_ptr": BOTH, "x_ptr": READ}),
        (kernels.put, {"pointers": WRITTEN, "values": BOTH}),  # Values may be pointers as far as anyone can tell.
        (kernels.shift_through_another, {"x_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.by_atomics, {"x_ptr": READ, "count_ptr": BOTH, "lock_ptr": BOTH}),
        (kernels.by_block_pointers, {"x_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.by_descriptors, {"x_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.swapped_in_a_loop, {"x_ptr": BOTH, "y_ptr": BOTH}),
        (kernels.chosen_by_a_branch, {"x_ptr": READ, "y_ptr": READ, "z_ptr": WRITTEN}),
        (kernels.reused_name, {"x_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.gathered, {"x_ptr": READ, "index_ptr": READ, "y_ptr": WRITTEN}),
        (kernels.escaping, {"x_ptr": BOTH, "y_ptr": WRITTEN}),
        (kernels.stored_pointer, {"x_ptr": BOTH, "table_ptr": WRITTEN}),
        (kernels.calling_itself, {"x_ptr": BOTH, "y_ptr": BOTH}),
        (kernels.through_a_returned_pointer, {"x_ptr": READ, "y_ptr": WRITTEN}),
    ],
    ids=lambda value: getattr(getattr(value, "fn", None), "__name__", ""),
)
def test_the_accesses_of_a_kernel_are_found(kernel: object, expected: dict[str, Access]) -> None:
    found = find_accesses(kernel)
    assert isinstance(found, dict)
    # Whole numbers such as a block's length are part of the arithmetic, but no data are ever given for them.
    assert {name: access for name, access in found.items() if name in expected or name.endswith("_ptr")} == expected


def test_pointers_made_of_numbers_cannot_be_followed() -> None:
    assert (
        find_accesses(kernels.made_of_numbers)
        == "it makes pointers out of numbers, which mean nothing at another place"
    )


def test_a_kernel_without_source_cannot_be_read() -> None:
    scope: dict[str, Any] = {}
    exec("def fn(x_ptr):\n    pass", scope)

    class Kernel:
        fn = staticmethod(scope["fn"])

    found = find_accesses(Kernel())
    assert isinstance(found, str)
    assert found.startswith("its source cannot be read")


def test_an_autotuned_kernel_is_read_like_the_one_inside() -> None:
    tuned = kernels.triton.autotune(configs=[kernels.triton.Config({"BLOCK": 16})], key=["n"])(
        kernels.by_block_pointers
    )
    assert find_accesses(tuned) == find_accesses(kernels.by_block_pointers)
