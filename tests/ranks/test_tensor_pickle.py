"""Tensors on their way to ranks and back."""

import pickle

import pytest
import torch
from torch import Tensor, nn

from shardwise.ranks.tensor_pickle import dumps

TENSORS = [
    torch.tensor(3.5),
    torch.arange(6).reshape(2, 3).t(),
    torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4)[1:],
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.ones(4).to(torch.float8_e4m3fn),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: f"{each.dtype}, {list(each.shape)}")
def test_a_tensor_comes_back_with_its_numbers_and_may_be_written(tensor: Tensor) -> None:
    (found,) = pickle.loads(dumps((tensor,)))
    assert (type(found), found.dtype, found.shape) == (Tensor, tensor.dtype, tensor.shape)
    assert found.tolist() == tensor.tolist()
    found.zero_()
    assert found.numel() == 0 or found.tolist() != tensor.tolist()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_what_is_more_than_numbers_is_sent_as_torch_does() -> None:
    parameter = pickle.loads(dumps(nn.Parameter(torch.ones(2))))
    assert isinstance(parameter, nn.Parameter)
    assert pickle.loads(dumps(torch.ones(2, requires_grad=True))).requires_grad
    sparse = torch.eye(2).to_sparse()
    assert pickle.loads(dumps(sparse)).to_dense().equal(torch.eye(2))
    marked = torch.ones(1)
    marked.mark = "kept"  # type: ignore[attr-defined]
    assert pickle.loads(dumps(marked)).mark == "kept"


def test_of_a_view_only_what_it_shows_is_sent() -> None:
    assert len(dumps(torch.zeros(100_000)[:2])) < 1000
