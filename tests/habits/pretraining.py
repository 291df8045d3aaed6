"""Losses of pretraining: means over what a mask has hidden, guarded against masks of nothing, and several means."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,override"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Block, Parallelize, Result, program, sgd

#: Plans that cut rows refuse several means over different numbers, and say how to write them.
SEVERAL = dict.fromkeys(("dp", "microbatches"), r"batch\['num_labels'\] = \(batch\['labels'\] != -100\).sum\(\), and")


def patches(seed: int, rows: int = 4) -> Batch:
    """Images in patches, of which a mask hides another number in each row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, 8, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, 6, generator=generator) < 0.5).double()
    mask[:, 0] = 1.0
    return {"x": x, "mask": mask}


class Painter(nn.Module):
    """It predicts patches from those that the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask[..., None]
        h = x * (1 - mask) + self.hidden * mask
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def run(parallelize: Parallelize, loss: Any, make: Any = patches, model: nn.Module | None = None) -> Result:
    engine = parallelize((model or Painter()).double(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


def errors(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return (output - given["x"]).square().mean(-1)


@program(but="cp", whole=True)
def a_mean_over_hidden_patches(parallelize: Parallelize) -> Result:
    """`(loss * mask).sum() / mask.sum()`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (errors(output, given) * given["mask"]).sum() / given["mask"].sum()

    return run(parallelize, loss)


@program(but="cp", whole=True)
def a_mean_and_a_small_number(parallelize: Parallelize) -> Result:
    """`/ (mask.sum() + 1e-6)`, as SimMIM divides."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (errors(output, given) * given["mask"]).sum() / (given["mask"].sum() + 1e-6)

    return run(parallelize, loss)


@program(but="cp", whole=True)
def a_smoothed_mean(parallelize: Parallelize) -> Result:
    """`/ (mask.sum() + 1)`; a part of a later batch hides nothing."""

    def make(step: int) -> Batch:
        made = patches(step)
        if step == 1:
            made["mask"][:2] = 0.0
        return made

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (errors(output, given) * given["mask"]).sum() / (1 + given["mask"].sum())

    return run(parallelize, loss, make)


@program(but="cp", whole=True)
def a_mean_over_words_and_a_small_number(parallelize: Parallelize) -> Result:
    """The mask is made from labels, and the example has no padding."""

    def make(step: int) -> Batch:
        made = sentences(step, uneven=False)
        made["labels"] = made["x"].clamp(min=1)
        if step:
            made["labels"][0, 1:] = 0
        return made

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(output[0].transpose(1, 2), given["labels"], reduction="none")
        keep = (given["labels"] != 0).double()
        return (losses * keep).sum() / (keep.sum() + 1e-3)

    return run(parallelize, loss, make, Bert())


@program(but="cp", whole=True)
def a_mean_of_one_at_least(parallelize: Parallelize) -> Result:
    """`/ mask.sum().clamp(min=1)`; a part of a later batch hides nothing."""

    def make(step: int) -> Batch:
        made = patches(step)
        if step == 1:
            made["mask"][:2] = 0.0
        return made

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (errors(output, given) * given["mask"]).sum() / given["mask"].sum().clamp(min=1)

    return run(parallelize, loss, make)


class Masking(Painter):
    """MAE: it draws what it hides, the same number in each row, and returns its loss with the mask."""

    def forward(self, x: Tensor) -> Any:
        noise = torch.rand(x.shape[0], x.shape[1], device=x.device)
        order = noise.argsort(1).argsort(1)
        mask = (order >= 2).to(x.dtype)
        made = super().forward(x, mask)
        each = (made - x).square().mean(-1)
        return (each * mask).sum() / mask.sum(), made, mask


@program({"pp": "random numbers drawn outside any unit"}, but="cp", whole=True)
def a_mean_over_patches_that_are_drawn(parallelize: Parallelize) -> Result:
    """`loss, _, _ = model(images)`: only that it is trained, since replicas draw numbers of their own."""
    example = {"x": patches(0)["x"]}
    engine = parallelize(Masking().double(), loss=lambda output, _: output[0], optimizer=sgd, example=example)
    return {"is a number": float(engine.train_step({"x": patches(1)["x"]}) > 0)}


class Bert(nn.Module):
    """Scores of words, and of whether a sentence is the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.words = nn.Linear(8, 12)
        self.next = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.words(h), self.next(h[:, 0])


def sentences(seed: int, *, uneven: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(12, (4, 5), generator=generator)
    labels = x.clone()
    labels[:, 2 if seed == 0 else 3 :] = -100
    if uneven:
        labels[0, 1:] = -100
    return {"x": x, "labels": labels, "next": torch.randint(2, (4,), generator=generator)}


def two_means(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    words = functional.cross_entropy(output[0].flatten(0, 1), given["labels"].flatten())
    return words + functional.cross_entropy(output[1], given["next"])


@program(SEVERAL, but="cp", whole=True)
def words_and_next_sentences(parallelize: Parallelize) -> Result:
    """BERT's two means: one over hidden words, one over rows."""
    return run(parallelize, two_means, sentences, Bert())


def two_sums(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    words = functional.cross_entropy(output[0].flatten(0, 1), given["labels"].flatten(), reduction="sum")
    following = functional.cross_entropy(output[1], given["next"], reduction="sum")
    return words / given["num_words"] + following / given["num_rows"]


def counted(seed: int) -> Batch:
    made = sentences(seed)
    return {**made, "num_words": (made["labels"] != -100).sum(), "num_rows": torch.tensor(len(made["next"]))}


@program(but="cp", whole=True)
def words_and_next_sentences_with_their_numbers(parallelize: Parallelize) -> Result:
    """The same as refusals tell to write it: sums, each divided by its number of the whole batch."""
    return run(parallelize, two_sums, counted, Bert())


@program(SEVERAL, but="cp", whole=True)
def words_and_next_sentences_later(parallelize: Parallelize) -> Result:
    """The two means, and an example whose rows have equally many hidden words."""
    return run(parallelize, two_means, lambda step: sentences(step, uneven=step > 0), Bert())
