"""Losses as users write them: means over labels of which some are ignored, masks, sums, and what is none of these."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Net, Parallelize, Result, program, sgd, small_net
from tests.habits.harness import batch as plain_batch

#: Plans that cut rows: what parts do not tell is refused there.
CUT = {"dp": "neither their mean by rows nor their sum", "pp": "neither their mean by rows nor their sum"}
IGNORED = {"dp": "labels are ignored here", "pp": "labels are ignored here"}


def uneven(seed: int) -> Batch:
    """Four rows of which each ignores another number of labels, the first none and the last all but one."""
    made: Batch = dict(plain_batch(seed))
    made["labels"] = made["labels"].clone()
    for row in range(1, 4):
        made["labels"][row, : min(row, 2)] = -100
    return made


def run(engine: Any, make: Any = uneven, *, steps: int = 3) -> dict[str, Any]:
    """A few steps and an evaluation."""
    found: dict[str, Any] = {f"loss {step}": engine.train_step(make(step)) for step in range(steps)}
    found["held out"] = engine.evaluate(make(9))
    return found | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def tried(parallelize: Parallelize, loss: Any, make: Any = uneven, example: Any = None, model: Any = None) -> Result:
    """The example has nothing that is ignored, unless one is given: what comes later is not known then."""
    engine = parallelize(
        model or small_net(), loss=loss, optimizer=sgd, example=plain_batch(0) if example is None else example
    )
    return run(engine, make)


def tokens(output: Tensor, given: Mapping[str, Tensor], **how: Any) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), **how)


@program(whole=True)
def labels_that_are_ignored(parallelize: Parallelize) -> Result:
    """The default of `cross_entropy`: -100 is left out of the mean, here another number of them in each row."""
    return tried(parallelize, tokens)


@program(whole=True)
def labels_that_are_ignored_in_the_example_too(parallelize: Parallelize) -> Result:
    """The same, known from the start."""
    return tried(parallelize, tokens, example=uneven(0))


@program(whole=True)
def padding_that_is_ignored(parallelize: Parallelize) -> Result:
    """`CrossEntropyLoss(ignore_index=pad)`, as translation models have it."""
    criterion = nn.CrossEntropyLoss(ignore_index=0)

    def make(seed: int) -> Batch:
        given = uneven(seed)
        return {**given, "labels": given["labels"].clamp(min=0)}

    return tried(parallelize, lambda output, given: criterion(output.flatten(0, 1), given["labels"].flatten()), make)


@program(whole=True)
def a_part_without_labels(parallelize: Parallelize) -> Result:
    """A row of which every label is ignored: its mean alone would be 0 / 0."""

    def make(seed: int) -> Batch:
        given = plain_batch(seed)
        given["labels"] = given["labels"].clone()
        given["labels"][2:] = -100
        return given

    return tried(parallelize, tokens, make)


@program(whole=True)
def classes_with_weights(parallelize: Parallelize) -> Result:
    """`weight=`: the mean is over the weights of the labels."""
    weight = torch.linspace(0.5, 2, 12, dtype=torch.float64)
    return tried(parallelize, lambda output, given: tokens(output, given, weight=weight))


@program(whole=True)
def smoothed_labels(parallelize: Parallelize) -> Result:
    """`label_smoothing`, with labels that are ignored."""
    return tried(parallelize, lambda output, given: tokens(output, given, label_smoothing=0.1))


@program(whole=True)
def likelihood_of_log_softmax(parallelize: Parallelize) -> Result:
    """`nll_loss(log_softmax(x))`, scaled by a constant."""

    def loss(output: Tensor, given: Any) -> Any:
        scores = functional.log_softmax(output.flatten(0, 1), -1)
        return 0.5 * functional.nll_loss(scores, given["labels"].flatten())

    return tried(parallelize, loss)


@dataclass
class Output:
    """As models of transformers return it."""

    loss: Tensor | None
    logits: Tensor


class WithLoss(Net):
    """A module that computes its loss itself from labels, shifted by one."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss, logits)


@program(whole=True)
def the_module_computes_the_loss(parallelize: Parallelize) -> Result:
    """`loss=lambda output, batch: output.loss`, as with the HF Trainer."""
    return tried(parallelize, lambda output, _: output.loss, model=WithLoss().double())


class SequencesWithLoss(Net):
    """The same for a sum over tokens."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), logits)


@program(whole=True)
def the_module_computes_a_sum(parallelize: Parallelize) -> Result:
    """A sum from inside of the module."""
    return tried(parallelize, lambda output, _: output.loss * 0.1, model=SequencesWithLoss().double())


@program(whole=True)
def accelerates_items_in_batch(parallelize: Parallelize) -> Result:
    """A sum divided by a constant that the user knows, as with `num_items_in_batch`."""
    return tried(parallelize, lambda output, given: tokens(output, given, reduction="sum") / 8)


def masked(seed: int) -> Batch:
    given = plain_batch(seed)
    mask = torch.ones_like(given["labels"], dtype=torch.float64)
    for row in range(1, 4):
        mask[row, : min(row, 2)] = 0
    return {**given, "mask": mask}


def open_mask(seed: int) -> Batch:
    given = masked(seed)
    return {**given, "mask": torch.ones_like(given["mask"])}


def by_mask(output: Tensor, given: Any) -> Any:
    losses = tokens(output, given, reduction="none").view_as(given["mask"])
    return (losses * given["mask"]).sum() / given["mask"].sum()


@program(whole=True)
def a_mean_by_a_mask(parallelize: Parallelize) -> Result:
    """`(loss * mask).sum() / mask.sum()`, where the example's mask hides nothing."""
    return tried(parallelize, by_mask, masked, example=open_mask(0))


@program(whole=True)
def a_mean_by_a_mask_of_bools(parallelize: Parallelize) -> Result:
    """`loss[mask].mean()`."""

    def make(seed: int) -> Batch:
        given = masked(seed)
        return {**given, "mask": given["mask"].bool()}

    def loss(output: Tensor, given: Any) -> Any:
        return tokens(output, given, reduction="none")[given["mask"].flatten()].mean()

    return tried(parallelize, loss, make, example=make(0))


@program(whole=True)
def a_mask_that_is_shifted(parallelize: Parallelize) -> Result:
    """`mask[:, 1:]`, as prompts are left out of fine-tuning."""

    def loss(output: Tensor, given: Any) -> Any:
        losses = tokens(output, given, reduction="none").view_as(given["mask"])[:, 1:]
        return (losses * given["mask"][:, 1:]).sum() / given["mask"][:, 1:].sum()

    def make(seed: int) -> Batch:
        given = open_mask(seed)
        given["mask"][0, 1] = 0
        given["mask"][2, 2] = 0
        return given

    return tried(parallelize, loss, make, example=open_mask(0))


@program({"dp": "divided by something", "microbatches": "divided by something"}, whole=True)
def every_fifth_label_left_out(parallelize: Parallelize) -> Result:
    """`keep = labels % 5 != 0`: the example has none of these, and 0 is one. Found by random modules."""

    def loss(output: Tensor, given: Any) -> Any:
        keep = (given["labels"] % 5 != 0).flatten()
        return (tokens(output, given, reduction="none") * keep).sum() / keep.sum()

    example = plain_batch(0)
    labels = torch.where(example["labels"] % 5 == 0, 7, example["labels"])
    return tried(parallelize, loss, plain_batch, example={**example, "labels": labels})


@program(whole=True)
def a_mask_made_from_labels(parallelize: Parallelize) -> Result:
    """`keep = labels != pad`, divided by hand; the example has no padding."""

    def make(seed: int) -> Batch:
        given = uneven(seed)
        given["labels"][:, -1] = 5  # A part with nothing that counts is 0 / 0 by the user's own division.
        return {**given, "labels": given["labels"].clamp(min=0)}

    def loss(output: Tensor, given: Any) -> Any:
        keep = (given["labels"] != 0).flatten()
        return (tokens(output, given, reduction="none") * keep).sum() / keep.sum()

    example = plain_batch(0)
    return tried(parallelize, loss, make, example={**example, "labels": example["labels"].clamp(min=1)})


@program(whole=True)
def rows_with_weights(parallelize: Parallelize) -> Result:
    """A weight for each row, and the mean over weights."""

    def make(seed: int) -> Batch:
        return {**plain_batch(seed), "weight": torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)}

    def loss(output: Tensor, given: Any) -> Any:
        rows = tokens(output, given, reduction="none").view(len(output), -1).mean(1)
        return (rows * given["weight"]).sum() / given["weight"].sum()

    return tried(parallelize, loss, make, example=make(0))


@program(whole=True)
def rows_with_weights_and_a_plain_mean(parallelize: Parallelize) -> Result:
    """The same divided by the number of rows: a mean over rows."""

    def make(seed: int) -> Batch:
        return {**plain_batch(seed), "weight": torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)}

    def loss(output: Tensor, given: Any) -> Any:
        rows = tokens(output, given, reduction="none").view(len(output), -1).mean(1)
        return (rows * given["weight"]).mean()

    return tried(parallelize, loss, make, example=make(0))


@program(whole=True)
def a_sum(parallelize: Parallelize) -> Result:
    """`reduction="sum"` is the sum of the whole batch."""
    return tried(parallelize, lambda output, given: 0.05 * tokens(output, given, reduction="sum"))


@program(whole=True)
def a_sum_over_tokens_and_a_mean_over_rows(parallelize: Parallelize) -> Result:
    """As variational models have it."""
    return tried(parallelize, lambda output, given: tokens(output, given, reduction="sum") / len(output))


@program(whole=True)
def a_sum_and_its_number(parallelize: Parallelize) -> Result:
    """The pair that is always right."""

    def loss(output: Tensor, given: Any) -> tuple[Tensor, Tensor]:
        return tokens(output, given, reduction="sum"), (given["labels"] != -100).sum()

    return tried(parallelize, loss)


@program({"dp": "the first is a mean", "pp": "the first is a mean"}, whole=True, but="tp")
def a_mean_and_its_number(parallelize: Parallelize) -> Result:
    """A pair whose first is no sum."""

    def loss(output: Tensor, given: Any) -> tuple[Tensor, Any]:
        return tokens(output, given), (given["labels"] != -100).sum()

    return tried(parallelize, loss)


@program(whole=True)
def a_mean_and_a_penalty_of_scores(parallelize: Parallelize) -> Result:
    """Two terms, a mean over labels and one over rows, while no label is ignored."""
    return tried(parallelize, lambda output, given: tokens(output, given) + output.square().mean(), plain_batch)


@program(IGNORED, whole=True)
def a_mean_and_a_penalty_with_ignored_labels(parallelize: Parallelize) -> Result:
    """And once some are: no one number weighs both terms."""
    return tried(parallelize, lambda output, given: tokens(output, given) + output.square().mean())


@program(IGNORED, whole=True)
def two_heads_that_ignore_differently(parallelize: Parallelize) -> Result:
    """Words and a class of the row, as BERT is trained."""

    def loss(output: Tensor, given: Any) -> Any:
        return tokens(output, given) + functional.cross_entropy(output.mean(1), given["labels"][:, -1].abs() % 12)

    return tried(parallelize, loss)


@program(CUT, whole=True)
def negatives_from_the_batch(parallelize: Parallelize) -> Result:
    """A contrastive loss: every row is held against all others, which are elsewhere."""

    def loss(output: Tensor, _: Any) -> Tensor:
        rows = output.mean(1)
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))

    return tried(parallelize, loss, plain_batch)


@program({"dp": "do not tell its loss", "pp": "do not tell its loss"}, whole=True)
def overlap_of_the_whole_batch(parallelize: Parallelize) -> Result:
    """A dice loss: one ratio of sums over all rows."""

    def loss(output: Tensor, given: Any) -> Any:
        scores, wanted = output.sigmoid(), functional.one_hot(given["labels"], 12)
        return 1 - 2 * (scores * wanted).sum() / (scores.sum() + wanted.sum())

    return tried(parallelize, loss, plain_batch)


@program({"dp": "do not tell its loss", "pp": "do not tell its loss"}, whole=True)
def divided_by_what_is_positive(parallelize: Parallelize) -> Result:
    """A focal loss, divided by the number of positive labels, as detectors have it."""

    def loss(output: Tensor, given: Any) -> Any:
        return output.square().sum() / (given["labels"] > 5).sum()

    return tried(parallelize, loss, plain_batch, example=_positive(0))


def _positive(seed: int) -> Batch:
    given = plain_batch(seed)
    labels = torch.tensor([[1, 2, 7], [7, 8, 9], [7, 7, 1], [1, 1, 8]])
    return {**given, "labels": labels}


@program(whole=True)
def squares(parallelize: Parallelize) -> Result:
    """`mse_loss`."""

    def loss(output: Tensor, given: Any) -> Any:
        return functional.mse_loss(output, functional.one_hot(given["labels"], 12).to(output))

    return tried(parallelize, loss, plain_batch)


@program(whole=True)
def yes_or_no(parallelize: Parallelize) -> Result:
    """`BCEWithLogitsLoss(pos_weight=...)`, as timm has it for many labels."""
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((12,), 3.0, dtype=torch.float64))

    def loss(output: Tensor, given: Any) -> Any:
        made: Tensor = criterion(output, functional.one_hot(given["labels"], 12).to(output))
        return made

    return tried(parallelize, loss, plain_batch)


@program(whole=True)
def soft_targets(parallelize: Parallelize) -> Result:
    """`kl_div(reduction="batchmean")` against a teacher's scores in the batch, as for distillation."""

    def make(seed: int) -> Batch:
        teacher = torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {**plain_batch(seed), "teacher": teacher}

    def loss(output: Tensor, given: Any) -> Any:
        wanted = given["teacher"].softmax(-1)
        return functional.kl_div(output.log_softmax(-1), wanted, reduction="batchmean")

    return tried(parallelize, loss, make, example=make(0))


@program(whole=True)
def mixed_up_labels(parallelize: Parallelize) -> Result:
    """Mixup: probabilities as targets, `cross_entropy` of these."""

    def make(seed: int) -> Batch:
        given = plain_batch(seed)
        one = functional.one_hot(given["labels"], 12).double()
        return {**given, "soft": 0.7 * one + 0.3 * one.flip(1)}

    def loss(output: Tensor, given: Any) -> Any:
        return functional.cross_entropy(output.flatten(0, 1), given["soft"].flatten(0, 1))

    return tried(parallelize, loss, make, example=make(0))


WIDE = dict.fromkeys(("dp", "pp"), "one_hot without num_classes")


@program(WIDE)
def classes_as_many_as_the_largest_label(parallelize: Parallelize) -> Result:
    """`one_hot(labels)`, and a mean over all classes."""

    def make(step: int) -> Batch:
        given = plain_batch(step)
        labels = given["labels"].clamp(max=8)
        labels[: 1 if step else 3, 0] = 9  # In all three rows that are tried, and later in one alone.
        return {"x": given["x"], "labels": labels}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        wanted = functional.one_hot(given["labels"]).to(output.dtype)
        return functional.mse_loss(output[..., : wanted.shape[-1]].softmax(-1), wanted)

    return tried(parallelize, loss, make, make(0))


@program()
def classes_that_were_chosen(parallelize: Parallelize) -> Result:
    """`one_hot(labels)` where its width does not matter: right."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        wanted = functional.one_hot(given["labels"]).to(output.dtype)
        return -(output.log_softmax(-1)[..., : wanted.shape[-1]] * wanted).sum(-1).mean()

    return tried(parallelize, loss, plain_batch)


@program(always=True)
def double_precision_of_a_head_in_single(parallelize: Parallelize) -> Result:
    """`cross_entropy(output.double(), labels)`, where the output has been rounded to float32."""

    class Head(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output.double().flatten(0, 1), given["labels"].flatten())

    engine = parallelize(Head().double(), loss=loss, optimizer=sgd, example=plain_batch(0))
    return {f"loss {step}": engine.train_step(plain_batch(step)) for step in range(3)}
