"""Operators without numbers: what is remembered of them is what they would return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardwise.stages.split import meta_results
from shardwise.stages.split.meta import Guesses
from tests.settings import settings_kept


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


OPERATORS: dict[str, Callable[[], Any]] = {
    "a norm": lambda: functional.layer_norm(on_meta(2, 3, 8), [8], on_meta(8), on_meta(8)),
    "a product with a bias": lambda: torch.addmm(on_meta(5), on_meta(3, 4), on_meta(4, 5)),
    "broadcast": lambda: on_meta(2, 1, 4) + on_meta(3, 1),
    "of two types": lambda: on_meta(3) * on_meta(3, dtype=torch.float64),
    "a number that is no integer": lambda: on_meta(3, dtype=torch.int64) * 0.5,
    "a number that is one": lambda: on_meta(3, dtype=torch.int64) * 1,
    "another layout": lambda: on_meta(4, 3).t() + 1,
    "two results": lambda: on_meta(3, 5).max(dim=1),
    "a list": lambda: torch.cat([on_meta(2, 3), on_meta(4, 3)]),
}


def outline(returned: Any) -> list[tuple[Any, ...]]:
    tensors = [returned] if isinstance(returned, Tensor) else list(returned)
    return [(each.shape, each.stride(), each.dtype, each.device.type) for each in tensors]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_second_call_gives_what_the_operator_would(name: str) -> None:
    wanted = outline(OPERATORS[name]())
    with Guesses():
        first = OPERATORS[name]()
        num_known = len(meta_results._KNOWN)
        second = OPERATORS[name]()
    assert outline(first) == outline(second) == wanted
    assert len(meta_results._KNOWN) == num_known, "it is known now"


def test_integers_that_are_divided_are_of_the_default_type() -> None:
    whole = on_meta(3, dtype=torch.int64)
    with settings_kept(), Guesses():
        assert (whole / 2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        assert (whole / 2).dtype is torch.float64


def test_views_and_what_is_written_into_stay_what_they_are() -> None:
    with Guesses():
        for _ in range(2):
            tensor = on_meta(4, 6)
            assert tensor.view(24).untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert tensor.add_(1) is tensor
            assert torch.ops.aten._unsafe_view(tensor, [24]).shape == (24,)
            assert torch.ops.aten._unsafe_view(tensor, [24]).untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_no_more_is_remembered_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_MOST", 3)
    monkeypatch.setattr(meta_results, "_KNOWN", {})
    with Guesses():
        for size in range(1, 9):
            assert (on_meta(size) + 1).shape == (size,)
            assert len(meta_results._KNOWN) <= 3


#: Operations whose shapes depend on data, of elements that all differ and masks that hide nothing.
BY_DATA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "counts of experts": lambda given, _: torch.bincount(given.flatten(), minlength=9),
    "sums of weights": lambda given, _: torch.bincount(given.flatten(), given.flatten().double(), minlength=9),
    "what a mask selects": lambda given, mask: given.masked_select(mask),
    "a mask of one row": lambda given, mask: given.masked_select(mask[:1]),
    "each once": lambda given, mask: given.repeat_interleave(mask[0].long(), dim=1),
    "other elements": lambda given, _: torch.unique(given),
    "where they are and how often": lambda given, _: torch.unique(given, return_inverse=True, return_counts=True),
    "other rows": lambda given, _: torch.unique(given, dim=0, return_counts=True),
    "other neighbours": lambda given, _: torch.unique_consecutive(given, return_counts=True),
    "other columns": lambda given, _: torch.unique_consecutive(given, return_inverse=True, dim=1),
}


@pytest.mark.parametrize("name", BY_DATA)
def test_shapes_that_depend_on_data_are_those_of_elements_that_all_differ(name: str) -> None:
    given, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.bool)
    wanted = BY_DATA[name](given, mask)
    with Guesses():
        found = BY_DATA[name](given.to("meta"), mask.to("meta"))
    pairs = zip(*([each] if isinstance(each, Tensor) else each for each in (found, wanted)), strict=True)
    assert all((one.shape, one.dtype, one.is_meta) == (other.shape, other.dtype, True) for one, other in pairs)
