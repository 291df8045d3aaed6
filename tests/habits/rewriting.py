"""Parameters that a forward writes: a teacher that follows its student, weights that are clamped or normalised."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits import harness
from tests.habits.harness import (
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

WRITES = "the forward writes to the parameter"
GONE = dict.fromkeys(("zero=3", "offload.parameters", "recompute", "cp"), f"{WRITES} .*, and under")
#: A teacher that follows is another one after each forward. Its distance is a mean, which parts of sequences are not.
APART = {"cp": "a part of a sequence"}
TWICE = {"pp": f"{WRITES}|on a second batch the 2 stages compute something else"} | APART
#: A step of one process writes once.
AGAIN = {"microbatches": f"{WRITES} .*so many times in a step"}
MOVED = dict.fromkeys(("zero", "offload.optimizer"), "gives it other memory") | GONE


class Teacher(nn.Module):
    """A student, and a teacher that follows it in every forward of training."""

    def __init__(self, move: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.student, self.teacher = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.move = move

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            with torch.no_grad():
                for mine, followed in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    self.move(mine, followed)
        hidden = self.embed(x)
        with torch.no_grad():
            target = self.teacher(hidden)
        made = self.student(hidden)
        return {"scores": self.head(made), "made": made, "target": target}


def follow(output: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(output["scores"], given) + functional.mse_loss(output["made"], output["target"])


def taught(parallelize: Parallelize, move: Callable[[Tensor, Tensor], Any]) -> Result:
    engine = parallelize(Teacher(move).double(), loss=follow, optimizer=sgd, example=batch(0))
    return trained(engine)


@program(GONE | TWICE | AGAIN)
def a_teacher_that_follows(parallelize: Parallelize) -> Result:
    """An average of weights in the module, moved by its forward."""
    return taught(parallelize, lambda mine, other: mine.mul_(0.9).add_(other, alpha=0.1))


@program(GONE | TWICE | AGAIN)
def a_teacher_that_follows_through_data(parallelize: Parallelize) -> Result:
    """The same as many write it, of which autograd keeps no count."""
    return taught(parallelize, lambda mine, other: mine.data.mul_(0.9).add_(0.1 * other.data))


@program(APART)
def a_teacher_that_stays(parallelize: Parallelize) -> Result:
    """A frozen target."""
    return taught(parallelize, lambda _, __: None)


class Block(nn.Module):
    """Two layers; the forward does something to the first one's weight."""

    def __init__(self, write: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(8, 16), nn.Linear(16, 8), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.up)
        made: Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


def written(parallelize: Parallelize, write: Callable[[nn.Linear], Any]) -> Result:
    return trained(start(parallelize, Net(block=lambda: Block(write)).double()))


@program({part: said for part, said in GONE.items() if part != "recompute"})
def weights_clamped_in_the_forward(parallelize: Parallelize) -> Result:
    """`weight.data.clamp_(...)`, as of a critic."""
    return written(parallelize, lambda layer: layer.weight.data.clamp_(-0.2, 0.2))


@program(MOVED)
def weights_normalised_in_the_forward(parallelize: Parallelize) -> Result:
    """`weight.data = normalize(weight.data)`, as before an angular loss."""

    def normalise(layer: nn.Linear) -> None:
        layer.weight.data = functional.normalize(layer.weight.data, dim=1)

    return written(parallelize, normalise)


@program(GONE | {"pp": f"{WRITES}.* in flight"})
def weights_shortened_in_place(parallelize: Parallelize) -> Result:
    """The same under `no_grad`."""

    @torch.no_grad()
    def shorten(layer: nn.Linear) -> None:
        layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))

    return written(parallelize, shorten)


class Codes(nn.Module):
    """Follows the rows that it sees with a frozen parameter, which only evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(8, 8), nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + torch.tanh(self.layer(x)) + self.code
        self.code.data.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x + torch.tanh(self.layer(x))


@program(
    dict.fromkeys(("dp", "cp"), f"{WRITES} .*replicas have different ones|{WRITES} .*, and under")
    | {"recompute": "second forward"}
)
def rows_followed_by_a_parameter(parallelize: Parallelize) -> Result:
    """A running mean in a parameter and not in a buffer: each replica would have its own."""
    return trained(start(parallelize, Net(block=Codes).double()))


class Average(nn.Module):
    """Follows rows with a buffer, in a way that counts as no write."""

    seen: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8), write
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(self.seen, x.detach().mean((0, 1)))
        return x + torch.tanh(self.layer(x))


UNLIKE = dict.fromkeys(("dp", "cp"), "the forward writes to the buffer .*, and 2 replicas have 2 different ones")


@program(UNLIKE)
def a_buffer_written_through_data(parallelize: Parallelize) -> Result:
    """`self.seen.data.mul_(...)`."""
    model = Net(block=lambda: Average(lambda seen, mean: seen.data.mul_(0.9).add_(0.1 * mean))).double()
    return trained(start(parallelize, model))


@program(UNLIKE)
def a_buffer_given_other_data(parallelize: Parallelize) -> Result:
    """`self.seen.data = ...`."""

    def write(seen: Tensor, mean: Tensor) -> None:
        seen.data = 0.9 * seen.data + 0.1 * mean

    return trained(start(parallelize, Net(block=lambda: Average(write)).double()))


class Rolled(harness.Block):
    """A factor for each channel between layers that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.data.copy_(self.scale.data.roll(1))
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))) * self.scale)
        return made


@program(only="tp", but="zero")
def factors_rolled_through_data(parallelize: Parallelize) -> Result:
    """What is written through `data` counts as no version: the trial of `tp` looks at numbers."""
    return trained(start(parallelize, small_net(block=Rolled)))


def copied(parallelize: Parallelize, move: Callable[[Tensor, Tensor], Any]) -> Result:
    model = Teacher(move).double()
    model.teacher.load_state_dict(model.student.state_dict())
    return trained(parallelize(model, loss=follow, optimizer=sgd, example=batch(0)))


@program(GONE | TWICE | AGAIN)
def a_teacher_that_begins_as_its_student(parallelize: Parallelize) -> Result:
    """The first step does not move it, and several forwards of a later step would move it several times."""
    return copied(parallelize, lambda mine, other: mine.mul_(0.9).add_(other, alpha=0.1))


@program(GONE | TWICE | AGAIN)
def such_a_teacher_through_data(parallelize: Parallelize) -> Result:
    """The same through `data`, which `recompute` would do twice as well."""
    return copied(parallelize, lambda mine, other: mine.data.mul_(0.9).add_(0.1 * other.data))
