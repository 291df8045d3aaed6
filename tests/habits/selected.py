"""Means over labels that a mask selects: by itself, beside other terms, in some parts of a batch only, or of none."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,override"

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Net, Parallelize, Result, batch, cross_entropy, program, sgd, small_net

UNEVEN = dict.fromkeys(("dp", "microbatches"), "over different numbers of labels")


def with_labels(write: Callable[[Tensor, int], None]) -> Callable[[int], Batch]:
    """Batches of which the first is as it is; labels of later ones are written to."""

    def make(step: int) -> Batch:
        made = batch(step)
        made = {"x": made["x"], "labels": made["labels"].clamp(min=1)}
        if step:
            write(made["labels"], step)
        return made

    return make


def padded(labels: Tensor, step: int) -> None:
    labels[0, 1:], labels[2, :step] = 0, 0


def answers(labels: Tensor, step: int) -> None:
    labels[0, 1:], labels[2, :step] = -100, -100


def nothing_to_learn(labels: Tensor, step: int) -> None:
    """In the first half of the second batch; a bit less in others."""
    labels[: 2 if step == 1 else 1] = -100


def run(parallelize: Parallelize, loss: Any, make: Callable[[int], Batch], model: nn.Module | None = None) -> Result:
    engine = parallelize(model or small_net(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(but="cp", whole=True)
def labels_that_are_no_padding(parallelize: Parallelize) -> Result:
    """`cross_entropy(scores[keep], labels[keep])`: the example has no padding."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = given["labels"] != 0
        return functional.cross_entropy(output[keep], given["labels"][keep])

    return run(parallelize, loss, with_labels(padded))


@program(UNEVEN, but="cp", whole=True)
def selected_labels_and_a_penalty(parallelize: Parallelize) -> Result:
    """The same, and a penalty of all scores."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = given["labels"] != -100
        seen = functional.cross_entropy(output[keep], given["labels"][keep])
        return seen + 0.1 * output.logsumexp(-1).square().mean()

    return run(parallelize, loss, with_labels(answers))


@program(but="cp", whole=True)
def nothing_selected_is_a_loss_of_0(parallelize: Parallelize) -> Result:
    """The guard of fine-tuning scripts: if all labels are of prompts, `scores.sum() * 0.0`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = given["labels"] != -100
        if keep.sum() == 0:
            return output.sum() * 0.0
        return functional.cross_entropy(output[keep], given["labels"][keep])

    return run(parallelize, loss, with_labels(nothing_to_learn))


@program(dict.fromkeys(UNEVEN, "has no mean over labels, and its loss is 0.001"), but="cp", whole=True)
def nothing_selected_is_a_small_loss(parallelize: Parallelize) -> Result:
    """The same guard with a number that is not 0."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = given["labels"] != -100
        if not keep.any():
            return output.sum() * 0.0 + 1e-3
        return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten())

    return run(parallelize, loss, with_labels(nothing_to_learn))


@program(UNEVEN, but="cp", whole=True)
def a_term_of_marked_tokens(parallelize: Parallelize) -> Result:
    """Tokens after a mark count again, if there is one: there is none in the example, and later in one row."""

    def make(step: int) -> Batch:
        made = batch(step)
        ids = made["x"].masked_fill(made["x"] == 5, 6)
        if step:
            ids[0, 1:] = 5
        return {**made, "x": ids}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        total, marked = cross_entropy(output, given), given["x"] == 5
        if marked.any():
            total = total + 0.5 * functional.cross_entropy(output[marked], given["labels"][marked])
        return total

    return run(parallelize, loss, make)


class Scored(Net):
    """It computes its loss itself, with a penalty of large scores, as nanoGPT's forks do."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = super().forward(x)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return scores, loss + 0.1 * scores.logsumexp(-1).square().mean()


@program(but="cp", whole=True)
def a_penalty_inside_of_the_module(parallelize: Parallelize) -> Result:
    """Labels are counted inside of the module, and none is ignored."""
    return run(parallelize, lambda output, _: output[1], batch, Scored().double())


@program(dict.fromkeys(UNEVEN, "divided by something that labels decides"), but="cp", whole=True)
def a_mask_and_ignored_labels(parallelize: Parallelize) -> Result:
    """Distillation over what the mask shows and labels do not ignore: the example hides nothing."""
    torch.manual_seed(3)
    teacher = small_net().requires_grad_(False)

    def make(step: int) -> Batch:
        made = with_labels(answers)(step)
        return {**made, "mask": torch.arange(3).expand(4, 3) < (2 if step else 3)}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = given["mask"] & (given["labels"] != -100)
        wanted = teacher(given["x"]).softmax(-1)
        return -((wanted * output.log_softmax(-1)).sum(-1) * keep).sum() / keep.sum()

    return run(parallelize, loss, make)


@program(UNEVEN, but="cp", whole=True)
def rows_of_another_kind_later(parallelize: Parallelize) -> Result:
    """All rows of the example have labels; later one has none, and another loss."""

    def make(step: int) -> Batch:
        return {**batch(step), "kind": torch.tensor([0, 0, 0, 1 if step else 0])}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        total, known = output.sum() * 0, given["kind"] == 0
        if known.any():
            total = total + cross_entropy(output[known], {"labels": given["labels"][known]})
        if not known.all():
            total = total + output[~known].square().mean()
        return total

    return run(parallelize, loss, make)


def weighed_if_told(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """A mean by weights, if the batch has some."""
    losses = functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none")
    if "weights" not in given:
        return losses.mean()
    return (losses * given["weights"]).sum() / given["weights"].sum()


def weights(step: int) -> Batch:
    drawn = torch.rand(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {**batch(step), "weights": drawn}


@program(but="cp", whole=True)
def weights_that_come_later(parallelize: Parallelize) -> Result:
    """The example has none."""
    return run(parallelize, weighed_if_told, lambda step: weights(step) if step else batch(step))


@program(dict.fromkeys(UNEVEN, "this batch has no weights"), but="cp", whole=True)
def weights_that_a_batch_lacks(parallelize: Parallelize) -> Result:
    """The example has some."""
    return run(parallelize, weighed_if_told, lambda step: batch(step) if step == 1 else weights(step))


class Chunked(Net):
    """It computes its loss in pieces, so that not all scores are there at a time."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        total = hidden.new_zeros(())
        for part, wanted in zip(self.norm(hidden).chunk(3, 1), labels.chunk(3, 1), strict=True):
            scores = self.head(part).flatten(0, 1)
            total = total + functional.cross_entropy(scores, wanted.flatten(), reduction="sum")
        return total / (labels != -100).sum()


@program(but="cp", whole=True)
def a_loss_in_chunks_inside_of_the_module(parallelize: Parallelize) -> Result:
    """Sums of chunks, divided by the number of labels: the example ignores none."""
    return run(parallelize, lambda output, _: output, with_labels(answers), Chunked().double())


class Known(Net):
    """Its loss is of those words alone that are no padding."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(super().forward(x).transpose(1, 2), labels, reduction="none")
        keep = labels != 2
        return (losses * keep).sum() / keep.sum()


@program(dict.fromkeys(UNEVEN, "divided by something that labels decides"), but="cp", whole=True)
def padding_with_a_number_inside_of_the_module(parallelize: Parallelize) -> Result:
    """`labels != tokenizer.pad_token_id`: the example has no padding."""

    def write(labels: Tensor, step: int) -> None:
        labels[0, 1:], labels[2, :step] = 2, 2

    def make(step: int) -> Batch:
        made = with_labels(write)(step)
        return made if step else {**made, "labels": made["labels"].clamp(min=3)}

    return run(parallelize, lambda output, _: output, make, Known().double())


class Regressed(nn.Module):
    """Its loss is of those targets alone that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        return functional.mse_loss(self.layers(x)[known], y[known])


@program(but="cp", whole=True)
def unknown_targets_inside_of_the_module(parallelize: Parallelize) -> Result:
    """Targets that are NaN, and none in the example."""

    def make(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (3, 4))
        y[0, 1:], y[2, :step] = (torch.nan, torch.nan) if step else (y[0, 1:], y[2, :step])
        return {"x": x, "y": y}

    return run(parallelize, lambda output, _: output, make, Regressed().double())
