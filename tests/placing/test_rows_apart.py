"""What microbatches of a placed module return is joined to what the whole batch would have given, or refused."""

import copy
from collections.abc import Callable
from typing import Any

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


class Gated(Trunk):
    """Rows meet behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return hidden + self.gate * hidden.mean(0)


class OfAll(torch.autograd.Function):
    """A gradient of one length for all rows together."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        found: Tensor = gradients[0] / gradients[0].norm()
        return found


class OfEach(OfAll):
    """What a row gets is decided by itself."""

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.01, 0.01)


class Backward(Trunk):
    function: type[OfAll] = OfAll

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.function.apply(self.up(x).tanh()))  # type: ignore[no-untyped-call]
        return made


class Masked(Trunk):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.hidden(x).square().mean(-1) * mask).sum() / mask.sum()


class WithPenalty(Trunk):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.hidden(x)
        return functional.cross_entropy(scores, labels) + scores.square().mean()


@pytest.mark.parametrize(("make", "words"), [(Gated, "with other weights"), (Backward, "in the backward alone")])
def test_rows_that_meet_later_or_in_the_backward_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    placed = sw.place(make(), PLACES, microbatches=2)
    with pytest.raises(ShardwiseError, match=words):
        placed(torch.randn(8, 6))


def test_a_backward_that_clips_the_gradient_of_each_row_is_right() -> None:
    plain = Backward().double()
    plain.function = OfEach
    module = copy.deepcopy(plain)
    placed, x = sw.place(module, PLACES, microbatches=2), torch.randn(8, 6, dtype=torch.float64)
    for each in (placed, plain):
        each(x).square().sum().backward()
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.allclose(own.grad, other.grad)


def test_a_mean_by_a_mask_and_one_beside_a_penalty_are_refused_where_microbatches_differ() -> None:
    placed = sw.place(Masked(), PLACES, microbatches=2)
    with pytest.raises(ShardwiseError, match="a mean by something of the batch"):
        placed(torch.randn(8, 6), torch.ones(8))
    placed, labels = sw.place(WithPenalty(), PLACES, microbatches=2), torch.arange(8)
    placed(torch.randn(8, 6), labels).backward()
    labels[0] = -100
    with pytest.raises(ShardwiseError, match="a mean over labels and something else in one number"):
        placed(torch.randn(8, 6), labels)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_are_not_linear_are_refused_whenever_they_come(late: bool) -> None:
    module = Trunk()
    module.forward = module.hidden
    placed = sw.place(module, PLACES, microbatches=2)
    placed(torch.randn(8, 6)).sum().backward()
    hooked: Any = module.up.weight
    hooked.register_hook(lambda gradient: 2 * gradient)
    placed(torch.randn(8, 6)).sum().backward()
    if late:
        hooked.register_post_accumulate_grad_hook(lambda _: None)
    else:
        hooked.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with pytest.raises(ShardwiseError, match=r"a hook of up.weight \(register_(post_accumulate_grad_)?hook\)"):
        placed(torch.randn(8, 6))


class Switched(Trunk):
    """Two outputs, of which one is asked for; and rows meet if an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_whitened = False
        self.middle, self.side = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, early: bool = False) -> tuple[Tensor, Tensor | None]:
        made = self.up(x).tanh()
        side = self.side(made)
        hidden: Tensor = self.down(self.middle(made).relu())
        return (hidden - hidden.mean(0) if self.is_whitened else hidden), side if early else None


def test_calls_that_the_stages_were_not_cut_for_are_refused() -> None:
    placed = sw.place(Switched(), PLACES, microbatches=2)
    placed(torch.randn(8, 6))
    with pytest.raises(ShardwiseError, match="cut for the first call"):
        placed(torch.randn(8, 6), early=True)


def test_an_attribute_that_makes_rows_meet_is_refused_when_it_is_set() -> None:
    module = Switched()
    placed = sw.place(module, PLACES, microbatches=2)
    for _ in range(2):
        placed(torch.randn(8, 6))
    module.is_whitened = True
    with pytest.raises(ShardwiseError, match="rows see each other"):
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


class GatedWidely(Trunk):
    """The same in a module that is too large to try its outputs as losses."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(2_000, 5_000)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return hidden + self.gate * hidden.mean(0) + self.wide.weight[0, :8]


def test_a_large_module_is_tried_with_other_weights_too() -> None:
    with pytest.raises(ShardwiseError, match=r"with other weights .* rows see each other"):
        sw.place(GatedWidely(), PLACES, microbatches=2)(torch.randn(8, 6))


class Rated(Trunk):
    """How its channels are ordered; the first of them is moved by what other rows have there."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.wide = by, nn.Linear(8, 40)

    def forward(self, x: Tensor) -> Tensor:
        made = self.wide(self.hidden(x))
        nudged = torch.cat([made[:, :1] + self.by * made[:, :1].mean(0), made[:, 1:]], -1)
        return nudged.argsort(-1)


def test_an_order_that_changes_in_a_few_places_is_no_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    assert sw.place(Rated(0.0), PLACES, microbatches=2)(x).shape == (8, 40)
    with pytest.raises(ShardwiseError, match="rows see each other"):
        sw.place(Rated(0.1), PLACES, microbatches=2)(x)
