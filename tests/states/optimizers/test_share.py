"""Which optimizer gets what, and which is refused."""

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from shardwise.errors import ShardwiseError
from shardwise.states.make_optimizers import MadeOptimizer, make_optimizers
from shardwise.states.muon import Muon, orthogonalise
from shardwise.states.parameter_group import MakeOptimizer, Share, is_hidden_matrix, shares_of, sort_out


class Own(SGD):
    """Somebody's optimizer: nobody knows what it does."""


def made(make: MakeOptimizer, *, whole: bool | None = None) -> MadeOptimizer:
    return make_optimizers([Share(make=make, whole=whole)], {"weight": nn.Parameter(torch.ones(5, 2))})[0]


@pytest.mark.parametrize("make", [AdamW, partial(SGD, lr=0.1, momentum=0.9)])
def test_an_optimizer_that_treats_every_number_by_itself_gets_pieces(make: type[Optimizer]) -> None:
    assert not made(make).sees_whole()


@pytest.mark.parametrize("make", [Adafactor, Muon, torch.optim.Muon])
def test_an_optimizer_of_matrices_does_not(make: type[Optimizer]) -> None:
    assert made(make).sees_whole()


def test_an_optimizer_that_nobody_knows_is_refused_until_one_says_which() -> None:
    make = partial(Own, lr=0.1)
    with pytest.raises(ShardwiseError, match="whether Own can update a piece by itself is not known") as error:
        made(make).sees_whole()
    assert "whole=True" in str(error.value.remedy)
    assert not made(make, whole=False).sees_whole()
    assert made(make, whole=True).sees_whole()


def test_parameters_go_to_the_first_share_that_takes_them() -> None:
    named = {
        "embed.weight": nn.Parameter(torch.ones(4, 2)),
        "layers.0.up.weight": nn.Parameter(torch.ones(2, 2)),
        "layers.0.up.bias": nn.Parameter(torch.ones(2)),
    }
    shares = [Share(make=Muon, takes=is_hidden_matrix), Share(make=AdamW)]
    assert sort_out(shares, named) == [["layers.0.up.weight"], ["embed.weight", "layers.0.up.bias"]]
    with pytest.raises(ShardwiseError, match=r"no optimizer takes embed.weight of shape \(4, 2\)"):
        sort_out(shares[:1], named)


def test_a_plain_factory_is_a_share_of_everything() -> None:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters)

    assert shares_of(make) == (Share(make=make),)


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ShardwiseError, match=r"Muon works on matrices, and was given a parameter of shape \(5,\)"):
        Muon([nn.Parameter(torch.ones(5))])


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_an_orthogonalised_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_muon_in_bf16_is_torchs(shape: tuple[int, int]) -> None:
    gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
    mine = Muon([ours], lr=0.1, weight_decay=0.1, dtype=torch.bfloat16)
    other = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in (mine, other):
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
