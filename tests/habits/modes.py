"""What modules compute in evaluation mode alone, or for a batch with other entries than the example has, and what a
`train` of their own does."""
# Programs as users write them.
# mypy: disable-error-code="override,no-any-return,operator,assignment,call-arg"

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Block, Net, Parallelize, Result, batch, cross_entropy, program, sgd, trained

OTHERS = dict.fromkeys(("pp", "tp"), "which it did not when the engine was made|other entries or attributes")
NOT_THERE = dict.fromkeys(("zero=3", "offload.parameters"), "has a `train` of its own that reads what this rank")


def told(parallelize: Parallelize, model: nn.Module, loss: Any = cross_entropy, **entries: Any) -> Result:
    """A few steps, with an evaluation and predictions after each, with and without labels."""
    example = {**batch(0), **entries}
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=example)
    found: dict[str, Any] = {}

    def evaluate(step: int) -> None:
        found[f"evaluated {step}"] = engine.evaluate({**batch(10 + step), **entries})
        for rows, given in ((4, batch(20 + step)), (6, {"x": batch(30 + step, rows=6)["x"]})):
            made = engine.predict({**given, **entries})
            for number, each in enumerate(made if isinstance(made, (tuple, list)) else [made]):
                found[f"{rows} rows {step}: {number}"] = each

    return {**trained(engine, between=evaluate), **found}


def scores_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def of_scores(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(scores_of(output), given)


class Showing(Net):
    """In evaluations it also returns what its first layers have made."""

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](self.embed(x))
        scores = self.head(self.norm(self.layers[1](first)))
        return scores if self.training else (scores, first)


@program()
def hidden_states_of_evaluations(parallelize: Parallelize) -> Result:
    """What its first layers have made comes from another stage than the scores."""
    return told(parallelize, Showing(), of_scores)


class Adding(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](self.embed(x))
        scores: Tensor = self.head(self.norm(self.layers[1](first)))
        return scores if self.training else scores + first.mean(-1, keepdim=True)


@program(always=True)
def an_early_feature_added_in_evaluations(parallelize: Parallelize) -> Result:
    """Under pp the last stage once added a placeholder."""
    return told(parallelize, Adding())


class AddingInSteps(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](self.embed(x))
        scores: Tensor = self.head(self.norm(self.layers[1](first)))
        return scores + first.mean(-1, keepdim=True) if torch.is_grad_enabled() else scores


@program()
def an_early_feature_added_with_gradients_on(parallelize: Parallelize) -> Result:
    """Runs on the example have gradients off, and what stages need was what they showed."""
    return told(parallelize, AddingInSteps())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, *, tells: bool = False) -> tuple[Tensor, Tensor | None]:
        made, weights = self.attend(x, x, x, need_weights=tells)
        return x + made, weights


class Mapped(Net):
    """Attention maps are asked for in evaluations: a layer returns a tensor where it returns None in training."""

    def __init__(self) -> None:
        super().__init__(block=Attending)

    def forward(self, x: Tensor) -> Any:
        hidden, maps = self.embed(x), []
        for layer in self.layers:
            hidden, weights = layer(hidden, tells=not self.training)
            maps.append(weights)
        scores = self.head(self.norm(hidden))
        return scores if self.training else (scores, *maps)


@program({"cp": "computes attention internally"})
def attention_maps_of_evaluations(parallelize: Parallelize) -> Result:
    """A layer returns a tensor where it returns None in training."""
    return told(parallelize, Mapped(), of_scores)


class Auxiliary(Net):
    """As GoogLeNet: a second head, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers[0](self.embed(x))
        early = self.aux(hidden) if self.training else None
        scores = self.head(self.norm(self.layers[1](hidden)))
        return scores if early is None else (scores, early)


def of_both(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    scores = of_scores(output, given)
    return scores + 0.3 * cross_entropy(output[1], given) if isinstance(output, tuple) else scores


@program()
def an_auxiliary_head_in_training_alone(parallelize: Parallelize) -> Result:
    """Evaluations call fewer units than training."""
    return told(parallelize, Auxiliary(), of_both)


class Extra(Net):
    """A frozen probe, in evaluations alone."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.head(self.norm(hidden))
        return scores if self.training else (scores, self.probe(hidden))


@program()
def a_head_in_evaluations_alone(parallelize: Parallelize) -> Result:
    """Evaluations call one more."""
    return told(parallelize, Extra(), of_scores)


class Twice(Net):
    """Predictions are means over two views."""

    def once(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(x) if self.training else (self.once(x) + self.once((x + 1) % 12)) / 2


@program({"pp": "which units run"})
def two_views_in_evaluations(parallelize: Parallelize) -> Result:
    """Each unit is called twice, so the first stage would come again."""
    return told(parallelize, Twice())


class Embedding(Net):
    """With labels it returns the loss, without them the scores and the hidden states, as many models do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        first = torch.tanh(self.layers[0].up(self.embed(x)))
        scores = self.head(self.norm(self.layers[1](self.layers[0].down(first))))
        if labels is None:
            return scores, first
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@program({"pp": "which it did not when the engine was made"}, always=True)
def hidden_states_of_a_batch_without_labels(parallelize: Parallelize) -> Result:
    """Under pp they were placeholders once."""
    engine = parallelize(Embedding().double(), loss=lambda output, _: output, optimizer=sgd, example=batch(0))
    first = engine.train_step(batch(0))
    scores, hidden = engine.predict({"x": batch(1)["x"]})
    return {"loss": first, "scores": scores, "hidden": hidden}


class Asked(Net):
    """An attribute asks for hidden channels."""

    def __init__(self) -> None:
        super().__init__()
        self.shows = False

    def forward(self, x: Tensor) -> Any:
        first = torch.tanh(self.layers[0].up(self.embed(x)))
        scores = self.head(self.norm(self.layers[1](self.layers[0].down(first))))
        return (scores, first) if self.shows else scores


@program(OTHERS)
def hidden_states_asked_for_by_an_attribute(parallelize: Parallelize) -> Result:
    """A flag that is set for predictions and taken back before the next step."""
    model = Asked().double()
    engine = parallelize(model, loss=cross_entropy, optimizer=sgd, example=batch(0))
    found: dict[str, Any] = {}
    for step in range(2):
        found[f"loss {step}"] = engine.train_step(batch(step))
        model.shows = True
        found[f"scores {step}"], found[f"hidden {step}"] = engine.predict(batch(7))
        model.shows = False
    return found


class Softened(Block):
    def __init__(self) -> None:
        super().__init__()
        self.soft = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        made: Tensor = self.down(hidden.softmax(-1) if self.soft else hidden)
        return x + made


@program({"tp": "other entries or attributes"})
def channels_that_meet_in_a_prediction(parallelize: Parallelize) -> Result:
    """Blocks normalise channels that tp has split, in predictions alone."""
    model = Net(block=Softened).double()
    engine = parallelize(model, loss=cross_entropy, optimizer=sgd, example=batch(0))
    found: dict[str, Any] = {"loss": engine.train_step(batch(0))}
    for each in model.layers:
        each.soft = True
    return {**found, "scores": engine.predict(batch(7))}


class Merging(nn.Linear):
    """As loralib's: `eval` merges the adapter into the weight, and `train` takes it off again."""

    def __init__(self, reads: int, makes: int) -> None:
        super().__init__(reads, makes)
        self.weight.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, reads)), nn.Parameter(torch.randn(makes, 2))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (-0.1 if mode else 0.1) * self.lora_b @ self.lora_a
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        made = functional.linear(x, self.weight, self.bias)
        return made if self.merged else made + 0.1 * x @ self.lora_a.T @ self.lora_b.T


class Adapted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down = Merging(16, 8)


@program(NOT_THERE, always=True)
def adapters_that_evaluations_merge(parallelize: Parallelize) -> Result:
    """After an evaluation they stayed merged once, and were trained no more."""
    return told(parallelize, Net(block=Adapted))


class Flagged(Net):
    """Its `train` sets an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = 1.0

    def train(self, mode: bool = True) -> "Flagged":
        self.sharpness = 1.0 if mode else 2.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.sharpness


@program()
def an_attribute_that_train_sets(parallelize: Parallelize) -> Result:
    """The forward reads what `train` has set."""
    return told(parallelize, Flagged())


class TurnedBlock(Block):
    """Turns its channels by what the module's `train` has set."""

    turns = 0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(functional.gelu(self.up(x)).roll(self.turns, -1))
        return made


class Turning(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TurnedBlock() for _ in range(2))

    def train(self, mode: bool = True) -> "Turning":
        for each in self.layers:
            each.turns = 0 if mode else 1
        return super().train(mode)


@program({"tp": "set by a train.. of the module's own"})
def channels_that_train_turns(parallelize: Parallelize) -> Result:
    """Of channels that tp has cut, the next one may be on another rank."""
    return told(parallelize, Turning())


@dataclass
class Inside:
    hidden: Tensor


@dataclass
class Outcome:
    scores: Tensor
    inside: Inside


class InDataclasses(Net):
    """The module itself returns a dataclass, in which there is another."""

    def forward(self, x: Tensor) -> Outcome:
        first = self.layers[0](self.embed(x))
        return Outcome(self.head(self.norm(self.layers[1](first))), Inside(first))


@program({"cp": "a part of a sequence"})
def a_dataclass_of_hidden_states_for_the_loss(parallelize: Parallelize) -> Result:
    """Under pp without parts it was refused, as torch did not look into it yet."""

    def loss(output: Outcome, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output.scores, given) + output.inside.hidden.square().mean()

    return trained(parallelize(InDataclasses().double(), loss=loss, optimizer=sgd, example=batch(0)))
