"""Forwards that go another way in evaluations, where nobody wants gradients: torch's own, and those of a script."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Block, Net, Parallelize, Result, batch, cross_entropy, program, sgd, small_net, start


def evaluated(engine: Any) -> Result:
    """A step, its held out rows, outputs, and a step after that."""
    found = {"first": engine.train_step(batch(0)), "held out": engine.evaluate(batch(7))}
    return found | {"outputs": engine.predict(batch(8)), "last": engine.train_step(batch(9))}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(x)))
        return scores


class Padded(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.arange(x.shape[1]) > x[:, :1] % 3
        scores: Tensor = self.head(self.encoder(self.embed(x), src_key_padding_mask=hidden))
        return scores


@program(only="tp")
def torch_encoder_evaluated(parallelize: Parallelize) -> Result:
    """`nn.TransformerEncoderLayer` reads weights in evaluation mode, and calls no layer."""
    return evaluated(start(parallelize, Encoder().double()))


@program({"tp": "gives zeros", "pp": "gives zeros", "cp": "nn.MultiheadAttention"})
def torch_encoder_with_padding_evaluated(parallelize: Parallelize) -> Result:
    """Hidden tokens are zeros then, and layers hand on nested tensors."""
    return evaluated(start(parallelize, Padded().double()))


class ShortWay(Block):
    """The same by a product of its own, where `is_short` says so."""

    def is_short(self) -> bool:
        return not self.training

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_short():
            return super().forward(x)
        hidden = functional.linear(self.norm(x), self.up.weight, self.up.bias)
        return x + functional.linear(torch.tanh(hidden), self.down.weight, self.down.bias)


class ShortWithoutGradients(ShortWay):
    def is_short(self) -> bool:
        return not torch.is_grad_enabled()


@program(only="tp")
def a_shorter_way_in_evaluation_mode(parallelize: Parallelize) -> Result:
    """`if not self.training: return fused(x, self.up.weight, ...)`."""
    return evaluated(start(parallelize, small_net(block=ShortWay)))


@program(only="tp")
def a_shorter_way_without_gradients(parallelize: Parallelize) -> Result:
    """The same by `torch.is_grad_enabled()`."""
    return evaluated(start(parallelize, small_net(block=ShortWithoutGradients)))


class Reads(Block):
    """In evaluation mode it reads another's weight; in a list, which hides that from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Block] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden if self.training else hidden * (1 + self.others[0].up.weight.mean())


@program(dict.fromkeys(("zero=3", "offload.parameters", "pp"), "in evaluation mode layers.0 reads layers.1.up.weight"))
def a_weight_read_in_evaluation_mode(parallelize: Parallelize) -> Result:
    """It is there for whoever reads it in training."""
    model = small_net(block=Reads)
    layers: list[Any] = list(model.layers)
    one, other = layers
    one.others, other.others = [other], [one]
    return evaluated(start(parallelize, model))


class Distilled(Net):
    """Two heads in training, and their mean in evaluations, as DeiT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        both = self.head(self.norm(hidden)), self.other(self.norm(hidden))
        return both if self.training else (both[0] + both[1]) / 2


@program()
def two_heads_and_their_mean(parallelize: Parallelize) -> Result:
    """`return (x, x_dist) if self.training else (x + x_dist) / 2`."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        heads = output if isinstance(output, tuple) else (output,)
        losses = [cross_entropy(each, given) for each in heads]
        return torch.stack(losses).mean()

    return evaluated(parallelize(Distilled().double(), loss=loss, optimizer=sgd, example=batch(0)))


class Retrieves(nn.Module):
    """Two towers, trained on the score of each pair. Asked without a target, it returns those of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: Tensor, found: Tensor, is_whole: bool = False) -> Tensor:
        one, other = self.one(x), self.other(found)
        scores: Tensor = one @ other.T if is_whole else (one * other).sum(-1)
        return scores


def pairs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    return {"x": numbers[0], "found": numbers[1], "labels": numbers[2, :, 0]}


@program({"dp": r"of shapes \(4, 4\), \(2, 2\), \(2, 2\)", "microbatches=2": r"of shapes \(4, 4\)"}, but="cp")
def scores_of_all_pairs(parallelize: Parallelize) -> Result:
    """Retrieval is evaluated by a matrix of all rows against all: parts of a batch have pieces of its diagonal."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, given["labels"])

    engine = parallelize(Retrieves().double(), loss=loss, optimizer=sgd, example=pairs(0))
    found = {"first": engine.train_step(pairs(0)), "outputs": engine.predict({**pairs(1), "is_whole": False})}
    return {**found, "all": engine.predict({**pairs(1), "is_whole": True})}


class OwnLoss(Net):
    """Its own loss beside its scores, as transformers' models have it."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(x)
        loss = None if labels is None else functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "scores": scores}


@program(but="cp", whole=True)
def its_own_loss_of_held_out_rows(parallelize: Parallelize) -> Result:
    """`engine.predict(batch)["loss"]`, of rows that ignore different numbers of labels; one ignores all."""
    engine = parallelize(OwnLoss().double(), loss=lambda output, _: output["loss"], optimizer=sgd, example=batch(0))
    held_out = [{name: each.clone() for name, each in batch(number).items()} for number in (1, 2)]
    held_out[1]["labels"][0, 1:] = held_out[1]["labels"][3] = -100
    found = {f"{number}": engine.predict(each) for number, each in enumerate(held_out)}
    made = {f"{number} {name}": value for number, each in found.items() for name, value in each.items()}
    return {**made, "first": engine.train_step(batch(3)), "scores": engine.predict({"x": batch(4)["x"]})["scores"]}
