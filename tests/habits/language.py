"""Losses and loops of repositories that train language models: preferences against a reference, distillation, terms
beside a cross-entropy that leave out the same tokens."""
# Programs as users write them.
# mypy: disable-error-code="no-untyped-call,no-any-return"

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.habits.harness import Batch, Net, Parallelize, Result, batch, cross_entropy, program, sgd, small_net


def some_labels(step: int, rows: int = 4) -> Batch:
    """A batch of which every row has another number of labels that are ignored, and a teacher's scores."""
    generator = torch.Generator().manual_seed(100 + step)
    made = batch(step, rows)
    hidden = torch.rand(made["labels"].shape, generator=generator) < 0.4
    hidden[:, 0] = False
    teacher = torch.randn(rows, 3, 12, generator=generator, dtype=torch.float64)
    return {**made, "labels": made["labels"].masked_fill(hidden, -100), "teacher": teacher}


def answers(step: int) -> Batch:
    """Pairs of answers, which of their tokens count, and the log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(step)
    one, other = batch(step), batch(step + 50)
    masks = (torch.rand(2, 4, 3, generator=generator) > 0.3).double()
    reference = torch.randn(2, 4, generator=generator).double()
    return {
        "chosen": one["x"], "rejected": other["x"], "chosen_mask": masks[0], "rejected_mask": masks[1],
        "chosen_reference": reference[0], "rejected_reference": reference[1],
    }  # fmt: skip


class Concatenated(Net):
    """Both answers in one forward, as trl's trainers have it."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Any:  # type: ignore[override]
        scores = super().forward(torch.cat([chosen, rejected]))
        return scores[: len(chosen)], scores[len(chosen) :]


def likelihoods(output: Any, given: Mapping[str, Tensor]) -> list[Tensor]:
    found = []
    for scores, name in zip(output, ("chosen", "rejected"), strict=True):
        each = scores[:, :-1].log_softmax(-1).gather(-1, given[name][:, 1:, None]).squeeze(-1)
        found.append((each * given[f"{name}_mask"][:, 1:]).sum(-1) - given[f"{name}_reference"])
    return found


def with_loss(parallelize: Parallelize, model: Net, loss: Callable[..., Any], make: Callable[[int], Any]) -> Result:
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(5)}
    return {**found, **engine.state_dict()}


@program(but="cp", whole=True)
def preferences_in_one_forward(parallelize: Parallelize) -> Result:
    """DPO: rows of chosen answers, and under them those of rejected ones."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = likelihoods(output, given)
        return -functional.logsigmoid(0.3 * (chosen - rejected)).mean()

    return with_loss(parallelize, Concatenated(), loss, answers)


@program(
    dict.fromkeys(("dp", "microbatches"), "what counts is decided by numbers of the batch"), but="cp", whole=True,
    always=True,
)  # fmt: skip
def answers_against_a_divergence_of_the_batch(parallelize: Parallelize) -> Result:
    """KTO: the mean divergence of the batch, which is negative at first, and cut off at 0."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = likelihoods(output, given)
        divergence = chosen.mean().detach().clamp(min=0)
        good, bad = torch.sigmoid(0.3 * (chosen - divergence)), torch.sigmoid(0.3 * (divergence - rejected))
        return torch.cat([1 - good, 1 - bad]).mean()

    return with_loss(parallelize, Concatenated(), loss, answers)


@program(but="cp", whole=True, always=True)
def scores_of_a_teacher_where_labels_count(parallelize: Parallelize) -> Result:
    """DistilBERT: the tokens that count are selected, and compared with a teacher's beside the cross-entropy."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        keep = (given["labels"] > -1).unsqueeze(-1).expand_as(output)
        student, teacher = (torch.masked_select(each, keep).view(-1, 12) for each in (output, given["teacher"]))
        near = functional.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
        return 2 * near + 0.5 * cross_entropy(output, given)

    return with_loss(parallelize, small_net(), loss, some_labels)


@program(but="cp", whole=True)
def normalisers_kept_small_where_labels_count(parallelize: Parallelize) -> Result:
    """The z-loss of PaLM: a mean of squares over the labels of the cross-entropy."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        squares = output.logsumexp(-1).square()
        return cross_entropy(output, given) + 1e-2 * squares[given["labels"] != -100].mean()

    return with_loss(parallelize, small_net(), loss, some_labels)


def beside_labels(parallelize: Parallelize, keeps: Callable[[Mapping[str, Tensor]], Tensor]) -> Result:
    """A cross-entropy, and a mean over the tokens that are kept."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        squares = output.logsumexp(-1).square()
        return cross_entropy(output, given) + 1e-2 * squares[keeps(given)].mean()

    def make(step: int) -> Batch:
        made = some_labels(step)
        return {**made, "labels": made["labels"].where(made["labels"] != 3, 4), "mask": made["labels"] != -100}

    return with_loss(parallelize, small_net(), loss, make)


TWO_MEANS = dict.fromkeys(
    ("dp", "microbatches"),
    "mean over labels that are not ignored, and something else|decides|neither their mean by rows",
)


@program(TWO_MEANS, but="cp", whole=True)
def normalisers_where_labels_are_another(parallelize: Parallelize) -> Result:
    """A word is left out beside ignored labels, and the example does not have it."""
    return beside_labels(parallelize, lambda given: (given["labels"] != -100) & (given["labels"] != 3))


@program(TWO_MEANS, but="cp", whole=True)
def normalisers_where_a_mask_says_so(parallelize: Parallelize) -> Result:
    """A mask that selects the same tokens as the labels in the example."""
    return beside_labels(parallelize, lambda given: given["mask"])


@program(TWO_MEANS, but="cp", whole=True)
def normalisers_of_all_tokens(parallelize: Parallelize) -> Result:
    """All tokens, also those without a label."""
    return beside_labels(parallelize, lambda given: given["labels"] >= -100)
