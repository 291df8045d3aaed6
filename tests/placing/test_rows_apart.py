"""What microbatches of a placed module return is joined to what the whole batch would have given, or refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.errors import ShardwiseError

PLACES = ["cpu:0", "cpu:1"]


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def hidden(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).tanh())
        return made


class OwnLoss(Trunk):
    """A mean over labels, as Hugging Face's models compute it, beside a mean and a sum over rows."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.hidden(x)
        return {
            "loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()),
            "mean": scores.square().mean(), "sum": scores.square().sum(), "scores": scores,
        }  # fmt: skip


class Pairs(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return hidden @ hidden.T


class Whitened(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return hidden - hidden.mean(0)


class WhitenedInTraining(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.drop(self.hidden(x)), 0.0, self.training)
        return hidden - hidden.mean(0) if self.training else hidden


class Contrast(Pairs):
    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(x), torch.arange(len(x)))


class Count(Trunk):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.hidden(x), len(x)


def test_numbers_are_means_over_labels_or_rows_or_sums_as_they_were() -> None:
    torch.manual_seed(0)
    plain = OwnLoss().double()
    module = copy.deepcopy(plain)
    placed = sw.place(module, PLACES, microbatches=4)
    for ignored in (0, 5, 7):  # Of the last row all, and of the one before some or all.
        x, labels = torch.randn(8, 4, 6, dtype=torch.float64), torch.randint(8, (8, 4))
        labels.view(-1)[len(labels.view(-1)) - ignored :] = -100
        ours, theirs = placed(x, labels), plain(x, labels)
        for made in (ours, theirs):
            (made["loss"] + 2 * made["mean"] + 0.1 * made["sum"]).backward()
        assert all(torch.allclose(ours[name], theirs[name]) for name in theirs)
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.allclose(own.grad, other.grad)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Pairs, r"of shapes \(4, 4\), \(2, 2\), \(2, 2\)"),
        (Whitened, "rows see each other in the forward"),
        (WhitenedInTraining, "rows see each other in the forward"),
        (Contrast, "neither their mean nor their sum"),
        (Count, "value 2 of it: 4, 2 and 2"),
    ],
)
def test_outputs_that_microbatches_do_not_tell_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    placed = sw.place(make(), PLACES, microbatches=2)
    with pytest.raises(ShardwiseError, match=words):
        placed(torch.randn(8, 6))


def test_what_is_tried_leaves_nothing() -> None:
    class Normed(Trunk):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.drop(self.norm(self.hidden(x)))
            return made

    torch.manual_seed(0)
    module = Normed()
    placed = sw.place(module, PLACES, microbatches=2)
    before = torch.get_rng_state()
    placed.eval()
    placed(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())
    placed.train()
    placed(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    assert module.norm.num_batches_tracked == 2  # One for each microbatch.
