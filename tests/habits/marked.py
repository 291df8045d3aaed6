"""Rows, labels and targets of a kind that the example has none of: marked ones, pairs of one class, other weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.habits.harness import Parallelize, Result, program, sgd
from tests.habits.switched import Rows, of_rows

VOID, PADDING = 255, 3
#: What the loss of a later batch is divided by cannot be told from the example alone.
DECIDED = dict.fromkeys(("dp", "microbatches"), "is divided by something that targets decides")
ALIKE = dict.fromkeys(("dp", "microbatches"), "with the same users in all rows")
WEIGHED = dict.fromkeys(("dp", "microbatches"), "with fractions in weights that are not the same in all rows")


def rows(seed: int, **others: Tensor) -> dict[str, Tensor]:
    """Eight rows. No label is `VOID`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (8,), generator=generator)
    return {"x": x, "labels": labels, "targets": x[:, 0] + x[:, 1], **others}


def later(parallelize: Parallelize, loss: Callable[..., Any], batches: Callable[[int], dict[str, Tensor]]) -> Result:
    """Five steps, whose fourth has what the example lacks; nobody compares that one with a step of one process."""
    engine = parallelize(Rows().double(), loss=loss, optimizer=sgd, example=batches(0))
    found = {f"loss {step}": engine.train_step(batches(step)) for step in range(5)}
    return found | dict(engine.state_dict())


def void(step: int) -> dict[str, Tensor]:
    made = rows(step)
    if step == 3:
        made["labels"][torch.tensor([0, 1, 5])] = VOID
    return made


@program(but="cp", whole=True, always=True)
def a_void_class_by_a_product(parallelize: Parallelize) -> Result:
    """`(losses * valid).sum() / valid.sum()` with `valid = labels != 255`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = given["labels"] != 255
        losses = functional.cross_entropy(output, given["labels"] * valid, reduction="none")
        return (losses * valid).sum() / valid.sum()

    return later(parallelize, loss, void)


@program(but="cp", whole=True, always=True)
def a_part_of_void_rows_alone(parallelize: Parallelize) -> Result:
    """In the fourth step a half of the rows has no label: its mean is 0 / 0, and the batch's is that of the others."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = given["labels"] != VOID
        losses = functional.cross_entropy(output, given["labels"] * valid, reduction="none")
        return (losses * valid).sum() / valid.sum()

    def batches(step: int) -> dict[str, Tensor]:
        made = rows(step)
        if step == 3:
            made["labels"][:4] = VOID
        return made

    return later(parallelize, loss, batches)


class Criterion:
    """Its mark is an attribute."""

    def __init__(self, ignored: int) -> None:
        self.ignored = ignored

    def __call__(self, output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = given["labels"].ne(self.ignored)
        found = -output.log_softmax(-1).gather(1, (given["labels"] * valid)[:, None]).squeeze(1)
        return found[valid].mean()


@program(but="cp", whole=True)
def a_void_class_of_a_criterion(parallelize: Parallelize) -> Result:
    """`self.ignored`, which a label is first in the fourth step."""
    return later(parallelize, Criterion(VOID), void)


@program(but="cp", whole=True, always=True)
def labels_from_0_on(parallelize: Parallelize) -> Result:
    """`labels >= 0`: -1 and -100 are none, of which the example has neither."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = given["labels"] >= 0
        losses = functional.cross_entropy(output, given["labels"] * valid, reduction="none")
        return (losses * valid).sum() / valid.sum()

    def batches(step: int) -> dict[str, Tensor]:
        made = rows(step)
        made["labels"][torch.tensor([0, 1, 5])] = (0, 0, -100, -1, -1)[step]
        return made

    return later(parallelize, loss, batches)


@program(but="cp", whole=True)
def a_class_that_is_padding(parallelize: Parallelize) -> Result:
    """`labels != PADDING`, one of the classes, which the example has too."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = (given["labels"] != PADDING).to(output)
        losses = functional.cross_entropy(output, given["labels"], reduction="none")
        return (losses * valid).sum() / valid.sum()

    return later(parallelize, loss, rows)


@program(dict.fromkeys(("dp", "microbatches"), "."), but="cp", whole=True)
def two_classes_that_do_not_count(parallelize: Parallelize) -> Result:
    """A mean over labels that are neither of two: by none of them alone."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        valid = (given["labels"] != 3) & (given["labels"] != VOID)
        losses = functional.cross_entropy(output, given["labels"] * valid, reduction="none")
        return (losses * valid).sum() / valid.sum()

    return later(parallelize, loss, void)


@program(DECIDED, but="cp", whole=True, always=True)
def unknown_targets_below_a_number(parallelize: Parallelize) -> Result:
    """`targets > -900`, where unknown ones are -999."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        known = given["targets"] > -900
        return functional.mse_loss(output[known, 0], given["targets"][known])

    return later(parallelize, loss, rows)


@program(ALIKE, but="cp", whole=True, always=True)
def pairs_of_one_user(parallelize: Parallelize) -> Result:
    """Rows of a user attract each other; in the example every row has a user of its own."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        users, made = given["users"], functional.normalize(output, dim=-1)
        pairs = (users[:, None] == users[None]).to(output).triu(1)
        return of_rows(output, given) + (pairs * (1 - made @ made.T)).sum() / len(output)

    apart, two = torch.arange(100, 108), torch.arange(100, 108) % 2
    return later(parallelize, loss, lambda step: rows(step, users=apart if step != 3 else two))


@program(WEIGHED, but="cp", whole=True, always=True)
def weights_over_the_largest_of_them(parallelize: Parallelize) -> Result:
    """Prioritised replay: `weights / weights.max()`, of which all are 1 at first."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        weights = given["weights"] / given["weights"].max()
        return (weights * functional.cross_entropy(output, given["labels"], reduction="none")).mean()

    ones = torch.ones(8, dtype=torch.float64)
    return later(parallelize, loss, lambda step: rows(step, weights=ones if step != 3 else rows(3)["targets"].abs()))


@program(but="cp", whole=True)
def weights_that_come_to_differ(parallelize: Parallelize) -> Result:
    """The same without their largest: a mean over rows."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (given["weights"] * functional.cross_entropy(output, given["labels"], reduction="none")).mean()

    ones = torch.ones(8, dtype=torch.float64)
    return later(parallelize, loss, lambda step: rows(step, weights=ones if step != 3 else rows(3)["targets"].abs()))


@program(but="cp", whole=True)
def numbers_of_a_loss_that_mark_nothing(parallelize: Parallelize) -> Result:
    """Thresholds of each row by itself, and factors: a mean over rows."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        errors = (output[:, 0] - given["targets"].clamp(-5.0, 5.0)).abs()
        huber = torch.where(errors < 2.0, 0.5 * errors**2, 2.0 * (errors - 1.0))
        return huber.mean() + 4.0 * functional.cross_entropy(output, given["labels"], label_smoothing=0.125)

    return later(parallelize, loss, rows)
