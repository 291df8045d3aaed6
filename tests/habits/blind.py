"""Mistakes where no step is compared with that of one process: random draws, batch norms, weights of 16 bits.

There only trials find them: each program here mixes rows, or is no mean over them, beside something of that kind.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Parallelize, Result, program, sgd

#: Under plans that compute a batch in parts.
PARTS = dict.fromkeys(("dp", "microbatches"), "parts of a batch do not tell its loss")


def rows(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(4, (8,), generator=generator)}


def small(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def fitted(parallelize: Parallelize, model: nn.Module, loss: Any, optimizer: Any = sgd) -> Result:
    engine = parallelize(model.double(), loss=loss, optimizer=optimizer, example=rows(0))
    found: dict[str, Any] = {f"loss {step}": engine.train_step(rows(step)) for step in range(4)}
    return {**found, **engine.state_dict()}


class _Vae(nn.Module):
    """The VAE of torch's examples: its noise is drawn in evaluations too."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.encode, self.both = nn.Linear(6, 16), nn.Linear(16, 8)
        self.decode, self.last, self.scale = nn.Linear(4, 16), nn.Linear(16, 6), scale

    def forward(self, x: Tensor) -> Any:
        mean, width = self.both(torch.relu(self.encode(x))).chunk(2, 1)
        hidden = mean + (width / 2).exp() * torch.randn_like(width) * self.scale
        return self.last(torch.relu(self.decode(hidden))), mean, width


def divergence(mean: Tensor, width: Tensor) -> Tensor:
    return -0.5 * (1 + width - mean.square() - width.exp())


@program(but="cp", whole=True)
def a_sum_beside_noise(parallelize: Parallelize) -> Result:
    """The loss is a sum: parts are added, and not divided. The noise is small enough to compare with plain torch."""

    def loss(output: Any, given: Batch) -> Tensor:
        far = functional.mse_loss(output[0], given["x"], reduction="sum")
        return far + divergence(output[1], output[2]).sum()

    return fitted(parallelize, _Vae(1e-7), loss, small)


@program(PARTS, but="cp,tp", whole=True)
def a_mean_and_a_sum_of_what_is_drawn(parallelize: Parallelize) -> Result:
    """The reconstruction is a mean, the divergence a sum: a habit that depends on the size of a batch."""

    def loss(output: Any, given: Batch) -> Tensor:
        return functional.mse_loss(output[0], given["x"]) + divergence(output[1], output[2]).sum() / 100

    return fitted(parallelize, _Vae(), loss)


@program(PARTS, but="cp,tp", whole=True)
def free_bits_of_what_is_drawn(parallelize: Parallelize) -> Result:
    """The mean over the batch of each channel's divergence is clamped."""

    def loss(output: Any, given: Batch) -> Tensor:
        bits = divergence(output[1], output[2]).mean(0).clamp(min=0.05).sum()
        return functional.mse_loss(output[0], given["x"]) + bits

    return fitted(parallelize, _Vae(), loss)


class _Drawn(nn.Module):
    """Users and negatives, which are drawn for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.items = nn.Linear(6, 8), nn.Embedding(20, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.user(x), self.items(labels), self.items(torch.randint(20, (5,)))


@program(PARTS, but="cp,tp,pp", whole=True)
def negatives_of_the_batch_and_drawn_ones(parallelize: Parallelize) -> Result:
    """A sampled softmax over both."""

    def loss(output: Any, given: Batch) -> Tensor:
        user, item, other = output
        scores = torch.cat([user @ item.T, user @ other.T], 1)
        return functional.cross_entropy(scores, torch.arange(len(given["x"])))

    return fitted(parallelize, _Drawn(), loss)


class _HalfNorm(nn.BatchNorm1d):
    """timm's split batch norm: the second half of a batch (another augmentation) has statistics of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        one, other = torch.split(x, len(x) // 2)
        return torch.cat([super().forward(one), self.other(other)])


class _Active(nn.BatchNorm1d):
    """A norm and its activation in one, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def normed(norm: type[nn.Module]) -> nn.Module:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8), norm(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.norm(self.first(x)))

    return Rows()


def of_rows(output: Any, given: Batch) -> Tensor:
    return functional.cross_entropy(output, given["labels"])


@program(PARTS, but="cp", whole=True)
def a_batch_norm_of_two_halves(parallelize: Parallelize) -> Result:
    """The halves of a part are not those of the batch."""
    return fitted(parallelize, normed(_HalfNorm), of_rows)


@program(but="cp", apart=True)
def a_batch_norm_with_an_activation(parallelize: Parallelize) -> Result:
    """A forward of its own, and nothing but a batch norm."""
    return fitted(parallelize, normed(_Active), of_rows)


class _Siamese(nn.Module):
    """SimSiam: a trunk with batch norms sees two views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.predict = nn.Linear(8, 8)

    def trunk(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.norm(self.first(x))))

    def forward(self, x: Tensor) -> Any:
        one, other = self.trunk(x), self.trunk(x.flip(-1))
        return self.predict(one), self.predict(other), one.detach(), other.detach()


@program({"pp": "call the batch norm norm"}, but="cp", apart=True)
def two_views_through_a_batch_norm(parallelize: Parallelize) -> Result:
    """Two stages would each have the statistics of one view, and save them."""

    def loss(output: Any, given: Batch) -> Tensor:
        del given
        near = functional.cosine_similarity
        return -(near(output[0], output[3]).mean() + near(output[1], output[2]).mean()) / 2

    return fitted(parallelize, _Siamese(), loss)


class _Half(nn.Module):
    """Layers in bfloat16, a norm and a head in float32; and a balancing number of the rows beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.bfloat16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.last(torch.relu(self.first(x.bfloat16()))).float())
        scores = self.head(hidden)
        return scores, hidden, 4 * scores.softmax(1).mean(0).square().sum()


def half(parallelize: Parallelize, loss: Any) -> Result:
    engine = parallelize(_Half(), loss=loss, optimizer=small, example=rows(0))
    return {f"loss {step}": engine.train_step(rows(step)) for step in range(4)}


@program(PARTS, but="cp,tp", whole=True)
def rows_that_meet_in_a_small_term_of_16_bits(parallelize: Parallelize) -> Result:
    """A contrastive term is smaller than what is rounding where weights have 16 bits."""

    def loss(output: Any, given: Batch) -> Tensor:
        hidden = functional.normalize(output[1], dim=1)
        return of_rows(output[0], given) + 0.02 * (hidden @ hidden.T).square().mean()

    return half(parallelize, loss)


@program(PARTS, but="cp,tp,pp", whole=True)
def a_small_balancing_number_of_16_bits(parallelize: Parallelize) -> Result:
    """The same of a number that the module returns beside its rows."""
    return half(parallelize, lambda output, given: of_rows(output[0], given) + 0.02 * output[2])
