"""Rows that see each other, in training alone or always; batches and losses of odd kinds."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import (
    Batch,
    Block,
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

MIXED = dict.fromkeys(("dp", "microbatches"), "in training mode the loss of 3 rows")


class Mixed(Net):
    """Mixup in the forward: half of each row is its neighbour, in training."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        if self.training:
            hidden = 0.7 * hidden + 0.3 * hidden.flip(0)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@program(MIXED)
def rows_mixed_in_training(parallelize: Parallelize) -> Result:
    """Mixup, with the same numbers every time."""
    return trained(start(parallelize, Mixed().double()))


class Centred(Block):
    """A norm over the batch, written by hand: evaluation has none of it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x - x.mean((0, 1))
        return super().forward(x)


@program({**MIXED, "cp": "other numbers"})
def a_batch_centred_in_training(parallelize: Parallelize) -> Result:
    """What is subtracted is a mean over all rows."""
    return trained(start(parallelize, small_net(block=Centred)))


class Standard(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-3))


STANDARD = r"see each other in layers\.0 \(Standard\)"


@program({"dp": STANDARD, "microbatches": STANDARD, "cp": "other numbers"})
def a_batch_standardised_always(parallelize: Parallelize) -> Result:
    """The same in evaluation as well."""
    return trained(start(parallelize, small_net(block=Standard)))


def summed(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    labels = given["labels"].flatten()
    return nn.functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum"), labels.numel()


@program({"dp": STANDARD, "microbatches": STANDARD, "cp": "other numbers"})
def a_batch_standardised_and_a_pair(parallelize: Parallelize) -> Result:
    """A sum and its number do not help where rows see each other before."""
    return trained(parallelize(small_net(block=Standard), loss=summed, optimizer=sgd, example=batch(0)))


IN_LOSS = "see each other in the loss"


@program({"dp": IN_LOSS, "microbatches": IN_LOSS}, but="cp")
def negatives_from_the_batch_as_a_pair(parallelize: Parallelize) -> Result:
    """A contrastive loss, summed over rows: each part would have fewer negatives."""

    def loss(output: Tensor, _: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        found = nn.functional.normalize(output.flatten(1), dim=-1)
        scores = found @ found.T / 0.1
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


class Guarded(Block):
    """Guards that a forward of today has: none of them changes a number here."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        if x.abs().max() > 1e6:
            x = x.clamp(-1e6, 1e6)
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        return super().forward(x if mask.all() else x * mask[..., None])


@program()
def guards_in_a_forward(parallelize: Parallelize) -> Result:
    """`if isnan(x).any()`, a clamp of what is too large, a short cut where nothing is masked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = start(parallelize, small_net(block=Guarded))
    return trained(engine)


class Balanced(Net):
    """A balancing loss of the batch's mean choice, as mixtures have it: its square is no mean over rows."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores, (scores.softmax(-1).mean((0, 1)) ** 2).sum()


@program({"dp": "neither their mean", "microbatches": "neither their mean", "cp": "other numbers"})
def a_balance_of_the_whole_batch(parallelize: Parallelize) -> Result:
    """A square of a mean over all rows, returned beside the scores."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = cross_entropy(output[0], given) + 0.5 * output[1]
        return found

    return trained(parallelize(Balanced().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"all": "it must be one number"})
def a_loss_of_each_token(parallelize: Parallelize) -> Result:
    """`reduction="none"` forgotten: no number comes back."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="none")

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"all": "it must be one number|does not depend on any parameter"})
def a_loss_as_a_number(parallelize: Parallelize) -> Result:
    """`.item()` too early."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Any:
        return cross_entropy(output, given).item()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def a_loss_of_shape_one(parallelize: Parallelize) -> Result:
    """One number in a row of one."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given).unsqueeze(0)

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def integers_of_another_size_later(parallelize: Parallelize) -> Result:
    """int32 after int64, as data from numpy may be."""
    engine = start(parallelize, small_net())
    found = {"loss 0": engine.train_step(batch(0))}
    found["loss 1"] = engine.train_step({"x": batch(1)["x"].int(), "labels": batch(1)["labels"]})
    return {**found, **engine.state_dict()}


@program()
def an_entry_more_later(parallelize: Parallelize) -> Result:
    """A later batch has an index that nobody asked for."""
    engine = start(parallelize, small_net())
    found = {"loss 0": engine.train_step(batch(0))}
    found["loss 1"] = engine.train_step({**batch(1), "index": torch.arange(4)})
    return {**found, **engine.state_dict()}


class Optional(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = super().forward(x)
        return scores if bias is None else scores + bias[:, None, None]


@program()
def an_argument_that_comes_later(parallelize: Parallelize) -> Result:
    """The example lacks what the forward takes and later batches have."""
    engine = start(parallelize, Optional().double())
    found = {"loss 0": engine.train_step(batch(0))}
    found["loss 1"] = engine.train_step({**batch(1), "bias": torch.arange(4).double()})
    return {**found, **engine.state_dict()}


@program()
def nothing_in_an_entry(parallelize: Parallelize) -> Result:
    """None in the example, a tensor later."""
    engine = parallelize(Optional().double(), loss=cross_entropy, optimizer=sgd, example={**batch(0), "bias": None})
    found = {"loss 0": engine.train_step({**batch(0), "bias": None})}
    found["loss 1"] = engine.train_step({**batch(1), "bias": torch.arange(4).double()})
    return {**found, **engine.state_dict()}


class Longest(Net):
    """Cut to the longest row of the batch, as loaders with padding do."""

    def forward(self, x: Tensor) -> Tensor:
        length = int((x > 0).sum(1).max())
        mask = torch.arange(x.shape[1]) < length
        return super().forward(x) * mask[:, None]


@program({"dp": "divided by something", "microbatches": "divided by something"})
def cut_to_the_longest_row(parallelize: Parallelize) -> Result:
    """A number computed from all rows decides what counts."""
    return trained(start(parallelize, Longest().double()))


class Early(Net):
    """Layers are left out by a number that the batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
            if float(x.double().mean()) > 5.5:
                break
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@program(dict.fromkeys(("dp", "pp"), "different units|which units run depends|neither their mean"))
def layers_left_out_by_the_batch(parallelize: Parallelize) -> Result:
    """Early exit by a mean over all rows."""
    return trained(start(parallelize, Early().double()))


@program()
def a_rate_that_follows_the_loss(parallelize: Parallelize) -> Result:
    """ReduceLROnPlateau with the engine's loss."""
    made: list[Any] = []

    def make(parameters: Any) -> Any:
        made.append(torch.optim.SGD(parameters, lr=0.5))
        return made[-1]

    engine = start(parallelize, small_net(), make)
    optimizer = engine.optimizers[0] if hasattr(engine, "optimizers") else made[0]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    found = {}
    for step in range(4):
        found[f"loss {step}"] = engine.train_step(batch(step))
        plateau.step(found[f"loss {step}"])
    return {**found, **engine.state_dict()}


class Cached(Net):
    """A mask made once and kept for its length."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.known:
            self.known[length] = torch.linspace(0.5, 1.5, length, dtype=torch.float64)
        return super().forward(x) * self.known[length][:, None]


@program({"cp": "other numbers"})
def a_table_kept_by_length(parallelize: Parallelize) -> Result:
    """A dictionary that forwards fill."""
    engine = start(parallelize, Cached().double())
    found = {}
    for step in range(3):
        found[f"loss {step}"] = engine.train_step({key: each[:, : 3 - step % 2] for key, each in batch(step).items()})
    return {**found, **engine.state_dict()}


MORE = dict.fromkeys(("dp", "microbatches"), "more rows than 3 do something else")


def eight(seed: int) -> Batch:
    return batch(seed, rows=8)


class Roomy(Block):
    """Experts of which each has room for ten tokens: three rows of three tokens never fill one, and a batch does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x.flatten(0, 1)).softmax(-1).max(-1)
        one = nn.functional.one_hot(chosen, 2)
        has_room = (one.cumsum(0) * one).sum(-1) <= 10
        found: Tensor = x + super().forward(x) * (weight * has_room).view(*x.shape[:2], 1)
        return found


@program({**MORE, "cp": "other numbers"}, always=True)
def experts_that_a_batch_fills(parallelize: Parallelize) -> Result:
    """Tokens beyond a capacity are dropped, counted over all rows."""
    return trained_on(parallelize, small_net(block=Roomy), eight)


class Many(Block):
    """Rows meet where there are four or more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.1 * x.mean(0) if len(x) >= 4 else x)


@program(MORE)
def rows_that_meet_from_four_on(parallelize: Parallelize) -> Result:
    """`if len(x) >= 4:`."""
    return trained_on(parallelize, small_net(block=Many), eight)


def trained_on(parallelize: Parallelize, model: nn.Module, make: Callable[[int], Batch]) -> Result:
    engine = parallelize(model, loss=cross_entropy, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Counts(Centred):
    """The same beside a counter, and from the third forward on alone."""

    count: Tensor

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.calls = first, 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.calls += 1
        return super().forward(x) if self.calls > self.first else Block.forward(self, x)


@program({**MIXED, "cp": "other numbers"}, always=True)
def rows_that_meet_beside_a_counter(parallelize: Parallelize) -> Result:
    """What a forward writes to a buffer is the same for any rows, and what it computes is not."""
    return trained(start(parallelize, small_net(block=lambda: Counts(0))))


@program(
    {**dict.fromkeys(("dp", "microbatches"), "forwards count .* and when it is 100000 in training mode"),
     "sp": "forwards count .* and when it is 100000 nothing can be shared out along the sequence"},
    but="cp,recompute", always=True,
)  # fmt: skip
def rows_that_meet_after_some_forwards(parallelize: Parallelize) -> Result:
    """`if self.calls > 3:`: decided by what the forward has counted itself."""
    return trained(start(parallelize, small_net(block=lambda: Counts(3))), steps=5)
