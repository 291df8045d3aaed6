"""Rotary positions of queries and keys at once."""

import pytest
import torch
from torch import Tensor

from shardwise import ShardwiseError, kernels
from tests.kernels.against import assert_alike, random_of


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    turned = torch.randn(shape)
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_fewer_keys_are_rotated_as_by_the_definition(interleaved: bool, dtype: torch.dtype) -> None:
    for heads, shared, dim, batch in ((6, 2, 16, 2), (3, 1, 10, 1)):
        query = random_of(2, heads, 3, dim, dtype=dtype)
        key = random_of(2, shared, 3, dim, dtype=dtype)
        assert_alike(kernels.rotary, (query, key, *angles(batch, 3, dim // 2)), interleaved=interleaved)


def test_heads_of_a_token_may_lie_beside_each_other_and_stay_so() -> None:
    query = torch.randn(2, 5, 4, 8).transpose(1, 2).detach().requires_grad_()
    key = torch.randn(2, 5, 6, 8)[:, :, 2:4].transpose(1, 2).detach().requires_grad_()
    assert_alike(kernels.rotary, (query, key, *angles(2, 5, 4)))
    assert kernels.rotary(query, key, *angles(2, 5, 4))[0].stride() == query.stride()


def test_positions_choose_rows_of_tables() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 3, 9, 9, 0]])
    assert_alike(kernels.rotary, (random_of(2, 4, 5, 8), random_of(2, 2, 5, 8), *angles(10, 4), positions))


def test_no_tokens_and_many_heads() -> None:
    assert_alike(kernels.rotary, (random_of(2, 4, 0, 8), random_of(2, 2, 0, 8), *angles(2, 0, 4)))
    assert_alike(kernels.rotary, (random_of(1, 70, 2, 64), random_of(1, 5, 2, 64), *angles(1, 2, 32)))


def test_it_may_be_done_in_place_where_no_gradient_is_wanted() -> None:
    query, key = random_of(2, 4, 5, 8, gradient=False), random_of(2, 2, 5, 8, gradient=False)
    turned = angles(2, 5, 4)
    wanted = kernels.rotary(query, key, *turned, kernels=False)
    for has_kernel in (True, False):
        given = query.clone(), key.clone()
        made = kernels.rotary(*given, *turned, in_place=True, kernels=has_kernel)
        assert made[0] is given[0]
        torch.testing.assert_close(made, wanted)
    with pytest.raises(ShardwiseError, match="overwrites tensors that require a gradient"):
        kernels.rotary(query.requires_grad_(), key, *turned, in_place=True)


def test_heads_that_are_rotated_in_part_go_to_the_definition() -> None:
    with pytest.warns(UserWarning, match="heads of 8 numbers of which 4 are rotated"), pytest.raises(RuntimeError):
        kernels.rotary(random_of(1, 1, 2, 8), random_of(1, 1, 2, 8), *angles(1, 2, 2))
