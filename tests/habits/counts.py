"""What counts rows, tokens and batches: in buffers, losses and outputs, where a part has fewer of them."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,override"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import (
    Batch,
    Net,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)

#: Plans that cut rows: what parts do not tell is refused there.
CUT = dict.fromkeys(("dp", "pp"), "neither their mean by rows nor their sum")
COUNTED = {"dp": "counts the rows that it is given in the buffer seen", "pp": "no unit has it"}


class Seen(Net):
    """Counts the rows that it has seen, and warms up by them."""

    seen: Tensor

    def __init__(self, *, warms: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.warms = warms

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]
        scores = super().forward(x)
        return scores * (self.seen / 16.0).clamp(max=1.0) if self.warms else scores


@program(COUNTED, whole=True)
def rows_counted_in_a_buffer(parallelize: Parallelize) -> Result:
    """`self.seen += len(x)`."""
    return trained(start(parallelize, Seen().double()))


@program({**COUNTED, "microbatches": CUT["pp"]}, whole=True)
def a_warm_up_by_rows_seen(parallelize: Parallelize) -> Result:
    """The same, and scores depend on it."""
    return trained(start(parallelize, Seen(warms=True).double()))


class Tokens(Net):
    """The same in an attribute, of tokens."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.numel()
        return super().forward(x) * min(1.0, self.seen / 40.0)


@program({**CUT, "cp": "a part of a sequence gives other numbers"}, whole=True)
def a_warm_up_by_tokens_in_an_attribute(parallelize: Parallelize) -> Result:
    """`self.seen += x.numel()`, which the next forward reads."""
    return trained(start(parallelize, Tokens().double()))


class Divided(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(x)


@program(CUT, whole=True)
def scores_divided_by_the_batch(parallelize: Parallelize) -> Result:
    """`scores / x.shape[0]` in the forward."""
    return trained(start(parallelize, Divided().double()))


class Literal(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores.reshape(4, -1, 12).reshape(x.shape[0], -1, 12) + scores.reshape(4, -1).mean(1).sum()


@program(dict.fromkeys(("dp", "pp"), "fail on 2 of them"), but="cp", whole=True)
def a_batch_size_as_a_literal(parallelize: Parallelize) -> Result:
    """`reshape(4, ...)` in the forward, of a script that has batches of four."""
    return trained(start(parallelize, Literal().double()))


def regression(rows: int = 4) -> Any:
    def make(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        made = dict(batch(seed, rows))
        made["target"] = torch.randn(rows, 3, 12, generator=generator, dtype=torch.float64)
        return made

    return make


def missing(seed: int) -> Batch:
    """Targets of which some are not known, another number in each row."""
    made = regression()(seed)
    for row in range(1, 4):
        made["target"][row, :, : 3 * row] = torch.nan
    return made


def fit(parallelize: Parallelize, loss: Any, make: Any = None, example: Any = None, model: Any = None) -> Result:
    make = make or regression()
    engine = parallelize(
        model or small_net(), loss=loss, optimizer=sgd, example=make(0) if example is None else example
    )
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    found["held out"] = engine.evaluate(make(9))
    return found | dict(engine.state_dict())


@program(CUT, but="cp", whole=True)
def the_root_of_a_mean(parallelize: Parallelize) -> Result:
    """RMSE: `sqrt(mse_loss(...))`."""
    return fit(parallelize, lambda output, given: functional.mse_loss(output, given["target"]).sqrt())


@program(CUT, but="cp", whole=True)
def a_flooded_loss(parallelize: Parallelize) -> Result:
    """`(loss - b).abs() + b`: never below `b`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (functional.mse_loss(output, given["target"]) - 1.2).abs() + 1.2

    return fit(parallelize, loss)


@program(but="cp", whole=True)
def a_flooded_loss_far_below(parallelize: Parallelize) -> Result:
    """The same with a level that the example is far above of."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return (functional.mse_loss(output, given["target"]) - 0.01).abs() + 0.01

    return fit(parallelize, loss)


@program(but="cp", whole=True)
def targets_that_are_missing(parallelize: Parallelize) -> Result:
    """Regression with NaN where nothing is known; the example knows everything."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        known = ~given["target"].isnan()
        return functional.mse_loss(output[known], given["target"][known])

    return fit(parallelize, loss, missing, example=regression()(0))


@program(CUT, but="cp", whole=True)
def a_sum_over_rows_and_a_mean_of_another(parallelize: Parallelize) -> Result:
    """A VAE's loss as many write it: one term is a sum over rows, the other one a mean."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, given["target"], reduction="sum") + output.square().mean()

    return fit(parallelize, loss)


@program(but="cp", whole=True)
def a_sum_divided_by_rows_and_a_mean(parallelize: Parallelize) -> Result:
    """The same, where both are means in the end."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        total = functional.mse_loss(output, given["target"], reduction="sum")
        return total / len(output) + 0.1 * output.square().mean()

    return fit(parallelize, loss)


@program(CUT, but="cp", whole=True)
def a_sum_and_a_constant(parallelize: Parallelize) -> Result:
    """`sum + 3.0`: parts would each add it."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.mse_loss(output, given["target"], reduction="sum") * 0.01 + 3.0

    return fit(parallelize, loss)


@program(CUT, but="cp", whole=True)
def weights_of_classes_from_the_batch(parallelize: Parallelize) -> Result:
    """Classes weigh by how seldom they are in this batch."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        counts = torch.bincount(given["labels"].flatten(), minlength=12).clamp(min=1)
        return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), weight=1.0 / counts.double())

    return fit(parallelize, loss, batch)


@program(CUT, but="cp", whole=True)
def only_what_is_above_a_margin(parallelize: Parallelize) -> Result:
    """`losses[losses > margin].mean()`: how many there are is known when they are computed."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="none")
        return losses[losses > 2.4].mean()

    return fit(parallelize, loss, batch)


@program(but="cp", whole=True)
def rows_each_by_their_own_length(parallelize: Parallelize) -> Result:
    """A mean over tokens of each row, then over rows."""

    def make(seed: int) -> Batch:
        mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.float64)
        return {**batch(seed), "mask": mask}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none")
        return ((losses * given["mask"]).sum(1) / given["mask"].sum(1)).mean()

    return fit(parallelize, loss, make)


@program(but="cp", whole=True)
def speech_recognition(parallelize: Parallelize) -> Result:
    """`ctc_loss`: time comes first, and each row's loss is divided by its own length."""

    class Spoken(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(-1).transpose(0, 1)

    def make(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(1, 12, (4, 2), generator=generator)
        return {
            "x": torch.randint(12, (4, 6), generator=generator), "words": words, "lengths": torch.tensor([2, 1, 2, 1]),
            "labels": words,
        }  # fmt: skip

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        times = torch.full((output.shape[1],), output.shape[0])
        return functional.ctc_loss(output, given["words"], times, given["lengths"])

    return fit(parallelize, loss, make, model=Spoken().double())


@program(CUT, but="cp", whole=True)
def pairs_of_rows_that_alternate(parallelize: Parallelize) -> Result:
    """DPO: chosen and rejected answers in turn."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = -functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").sum(1)
        return -functional.logsigmoid(rows[0::2] - rows[1::2]).mean()

    return fit(parallelize, loss, batch)


@program(but="cp", whole=True)
def groups_of_answers(parallelize: Parallelize) -> Result:
    """GRPO: each answer against the mean of its group of two."""

    def make(seed: int) -> Batch:
        reward = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {**batch(seed, 8), "reward": reward}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        groups = given["reward"].view(-1, 2)
        gain = (groups - groups.mean(1, keepdim=True)).flatten()
        rows = functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").mean(1)
        return (gain * rows).mean()

    return fit(parallelize, loss, make)


@program(dict.fromkeys(("pp", "zero=3", "tp", "cp"), "which units run depends on the data|batch.'task'.*cannot be cut"))
def a_task_named_by_a_word(parallelize: Parallelize) -> Result:
    """A word that has as many letters as the batch has rows."""

    class Tasks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"lmlm": nn.Linear(12, 12), "tags": nn.Linear(12, 12)})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](super().forward(x))

    def make(seed: int) -> dict[str, Any]:
        return {**batch(seed), "task": "lmlm" if seed % 2 else "tags"}

    return fit(parallelize, cross_entropy, make, model=Tasks().double())
