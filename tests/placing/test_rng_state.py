"""Random numbers on places: by seed, stage and microbatch, whoever is first."""

import random
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.stages.small import small_matrices

PLACES = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


class Dropping(nn.Module):
    """Blocks with dropout, and with noise that is no dropout."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), Noise()) for _ in range(4)
        )
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.training else x


def lag(module: nn.Module) -> None:
    """Let threads come to their draws in another order each time."""
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.register_forward_pre_hook(lambda *_: time.sleep(random.uniform(0, 0.003)))


def run(placed: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    placed.zero_grad()
    output: Tensor = placed(x)
    output.sum().backward()  # type: ignore[no-untyped-call]
    return output.detach(), [each.grad.clone() for each in placed.parameters() if each.grad is not None]


def test_masks_depend_on_the_seed_and_not_on_who_is_first() -> None:
    module = Dropping()
    placed, x = sw.place(module, PLACES, microbatches=4), torch.ones(8, 8)
    first, gradients = run(placed, x, seed=1)
    lag(module)
    for _ in range(3):
        again, same = run(placed, x, seed=1)
        assert torch.equal(again, first)
        assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
    assert not torch.equal(run(placed, x, seed=2)[0], first)
    # Rows of all microbatches, alike as they are, differ in what is dropped.
    assert len({tuple(row.tolist()) for row in first}) == len(first)


def test_what_draws_nothing_leaves_the_generator_alone() -> None:
    placed = sw.place(Dropping().eval(), PLACES, microbatches=4)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = placed(torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(placed(torch.ones(8, 8)), first)
    assert torch.equal(torch.get_rng_state(), before)
    placed.train()
    assert not torch.equal(placed(torch.ones(8, 8)), first)
    assert not torch.equal(torch.get_rng_state(), before)


def test_dropout_that_would_be_drawn_again_in_the_backward_is_refused() -> None:
    placed = sw.place(Dropping(recomputes=True), PLACES, microbatches=4)
    with pytest.raises(ShardwiseError, match="draws random numbers") as caught:
        placed(torch.ones(8, 8))
    assert caught.value.remedy == "microbatches=1, a dropout of 0, or no gradient checkpointing"


def test_recomputation_without_dropout_goes() -> None:
    module = Dropping(recomputes=True)
    for each in module.modules():
        if isinstance(each, nn.Dropout | Noise):
            each.eval()
    plain = Dropping().eval()
    x = torch.randn(8, 8)
    plain(x).sum().backward()
    sw.place(module, PLACES, microbatches=4)(x).sum().backward()
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
