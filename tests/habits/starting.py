"""What the weights at the start hide: gates and adapters that begin at 0, and a model that begins as its reference."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,override,misc"

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Block, Net, Parallelize, Result, batch, cross_entropy, program, sgd, small_net

OTHER = dict.fromkeys(("dp", "microbatches"), "with other weights than those that training begins with")
UNEVEN = dict.fromkeys(("dp", "microbatches"), "labels are ignored here, and the loss is a mean over the others and")


def trainable(parameters: Any) -> torch.optim.Optimizer:
    return sgd([each for each in parameters if each.requires_grad])


def answers(step: int) -> Batch:
    """Prompts without labels, but in the example."""
    made = batch(step)
    labels = made["labels"].clone()
    if step:
        labels[0, :2], labels[3, : step % 2] = -100, -100
    return {"x": made["x"], "labels": labels}


def run(parallelize: Parallelize, model: nn.Module, loss: Any, make: Callable[[int], Batch]) -> Result:
    engine = parallelize(model.double(), loss=loss, optimizer=trainable, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(4)}
    return {**found, **engine.state_dict()}


def with_reference() -> tuple[nn.Module, nn.Module]:
    reference = small_net().requires_grad_(False)
    return copy.deepcopy(reference).requires_grad_(True), reference


def scores_of(output: Tensor, ids: Tensor) -> Tensor:
    return output.log_softmax(-1).gather(-1, ids[..., None])[..., 0].sum(-1)


@program(UNEVEN, but="cp", whole=True)
def a_preference_beside_labels(parallelize: Parallelize) -> Result:
    """A preference loss and labels, as TRL's `rpo_alpha` adds them: log 2 for all rows as long as the policy is the
    reference."""
    policy, reference = with_reference()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            known = reference(given["x"])
        margin = scores_of(output, given["x"]) - scores_of(known, given["x"])
        return cross_entropy(output, given) - functional.logsigmoid(0.5 * margin).mean()

    return run(parallelize, policy, loss, answers)


class Taught(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = with_reference()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.student(x)
        wanted = self.teacher(x).softmax(-1)
        apart = functional.kl_div(scores.log_softmax(-1), wanted, reduction="none").sum(-1).mean()
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()) + 3 * apart


@program(UNEVEN, but="cp", whole=True)
def a_teacher_that_the_student_begins_as(parallelize: Parallelize) -> Result:
    """The distance to it is 0 in the example, whatever the rows."""
    return run(parallelize, Taught(), lambda output, _: output, answers)


@program(but="cp", whole=True)
def a_distance_that_is_0_at_first(parallelize: Parallelize) -> Result:
    """A mean by a mask, of which the example shows nothing: the whole loss is 0 there, and so is its gradient."""
    policy, reference = with_reference()

    def make(step: int) -> Batch:
        lengths = torch.tensor([3, 1 + step % 3, 3, 2]) if step else torch.full((4,), 3)
        return {**batch(step), "mask": torch.arange(3) < lengths[:, None]}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        wanted = reference(given["x"]).softmax(-1)
        apart = functional.kl_div(output.log_softmax(-1), wanted, reduction="none").sum(-1)
        return (apart * given["mask"]).sum() / given["mask"].sum()

    engine = parallelize(policy, loss=loss, optimizer=sgd, example=make(0))
    found = {}
    for step in range(4):
        found[f"loss {step}"] = engine.train_step(make(step))
        for each in reference.parameters():
            each.data.mul_(1.1)
    return {**found, **engine.state_dict()}


class ReZero(Block):
    """Without the mean over rows, behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return x + self.gate * (hidden - hidden.mean(0))


@program(OTHER, but="cp", whole=True)
def rows_that_meet_behind_a_gate(parallelize: Parallelize) -> Result:
    """ReZero."""
    return run(parallelize, Net(block=ReZero), cross_entropy, batch)


class Centred(ReZero):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x + self.gate * Block.forward(self, x)


@program(OTHER, but="cp", whole=True)
def rows_that_meet_behind_a_gate_in_training(parallelize: Parallelize) -> Result:
    """The same, and not in evaluations."""
    return run(parallelize, Net(block=Centred), cross_entropy, batch)


class Lora(Block):
    """Its factors are scaled by all rows, and the second is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return super().forward(x) + self.second(hidden / hidden.square().mean().sqrt())


@program(OTHER, but="cp", whole=True)
def rows_that_meet_in_an_adapter(parallelize: Parallelize) -> Result:
    """LoRA begins at 0."""
    return run(parallelize, Net(block=Lora), cross_entropy, batch)


class Routed(Block):
    """A router's penalty is left on the block."""

    penalty: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        self.penalty = scores.logsumexp(-1).square().mean()
        return super().forward(x) + scores.softmax(-1).repeat(1, 1, 2)


@program({"pp": "penalty"}, but="cp", whole=True)
def a_penalty_of_each_token_on_the_blocks(parallelize: Parallelize) -> Result:
    """`loss + sum(block.penalty for block in model.layers)`, a mean over tokens: parts have means of their own."""
    model = Net(block=Routed)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) + 0.1 * sum(each.penalty for each in model.layers)

    return run(parallelize, model, loss, batch)


class Noting(Block):
    """It notes how large its values are, and the next block reads that, behind a gate that is closed at first."""

    size = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, before: Any = None) -> Tensor:
        made = super().forward(x)
        made = made if before is None else made + self.gate * before.size * x
        self.size = float(made.detach().abs().max())
        return made


class Noted(Net):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return self.head(self.norm(second(first(self.embed(x)), first)))


@program(
    dict.fromkeys(("dp", "pp"), "not the gradient of layers.1.gate|the 2 stages compute something else"),
    but="cp,tp", whole=True,
)  # fmt: skip
def a_number_behind_a_gate(parallelize: Parallelize) -> Result:
    """A float that one block leaves for the next."""
    return run(parallelize, Noted(block=Noting), cross_entropy, batch)
