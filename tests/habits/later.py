"""Values that a script sets between steps, with which a forward or a loss does something else than it was tried with:
a curriculum, a term whose weight begins at 0, a mode of a criterion, an activation exchanged."""
# Programs as users write them.
# mypy: disable-error-code="no-untyped-call,no-any-return,assignment,arg-type,union-attr,operator"

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import (
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

SET = "was set since the engine was made, and with it"
PARTS = dict.fromkeys(("dp", "microbatches"), f"{SET} the loss of 3 rows")
CUT = {"tp": f"{SET} .* cannot be cut"}
AWAY = dict.fromkeys(("zero=3", "pp", "offload.parameters"), f"{SET} layers.0 reads embed.weight")
#: What the file's own variable says of losses.
HARDEST = False


def by_row(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").mean(1)


def with_loss(parallelize: Parallelize, loss: Callable[..., Any], change: Callable[[], None], steps: int = 3) -> Result:
    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))
    return trained(engine, steps=steps, between=lambda _: change())


def with_blocks(parallelize: Parallelize, block: Callable[[], nn.Module], change: Callable[[Any], None]) -> Result:
    """A net of these blocks, each changed behind the first step."""
    model = small_net(block=block)
    engine = start(parallelize, model)

    def between(_: int) -> None:
        for each in model.layers:
            change(each)

    return trained(engine, between=between)


@program(PARTS, but="cp", whole=True)
def contrast_that_begins_later(parallelize: Parallelize) -> Result:
    """A term over pairs of rows whose weight is 0 at first."""
    weight = {"contrast": 0.0}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        each = output.mean(1)
        return cross_entropy(output, given) + weight["contrast"] * functional.cross_entropy(
            each @ each.T, torch.arange(len(each))
        )

    return with_loss(parallelize, loss, lambda: weight.update(contrast=0.5))


@program(but="cp", whole=True)
def a_term_of_rows_that_begins_later(parallelize: Parallelize) -> Result:
    """The same of a term that is a mean over rows, whose weight rises with every step: right."""
    weight = [0.0]

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) + weight[0] * output.pow(2).mean()

    return with_loss(parallelize, loss, lambda: weight.__setitem__(0, weight[0] + 0.1))


@program(PARTS, but="cp", whole=True)
def a_criterion_with_a_mode(parallelize: Parallelize) -> Result:
    """`criterion.hardest = True`, an attribute that its class has at first."""

    class Criterion(nn.Module):
        hardest = False

        def forward(self, output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
            each = by_row(output, given)
            return each.max() if self.hardest else each.mean()

    criterion = Criterion()
    return with_loss(parallelize, criterion, lambda: setattr(criterion, "hardest", True))


@program(but="cp", whole=True)
def a_sum_from_then_on(parallelize: Parallelize) -> Result:
    """`criterion.reduction = "sum"` of torch's own: parts are added up from then on."""
    criterion = nn.CrossEntropyLoss()
    return with_loss(
        parallelize,
        lambda output, given: criterion(output.flatten(0, 1), given["labels"].flatten()),
        lambda: setattr(criterion, "reduction", "sum"),
    )


@program(PARTS, but="cp", whole=True)
def a_criterion_exchanged(parallelize: Parallelize) -> Result:
    """`state["criterion"] = another`."""
    state: dict[str, Any] = {"criterion": lambda output, given: by_row(output, given).mean()}

    def change() -> None:
        state["criterion"] = lambda output, given: by_row(output, given).max()

    return with_loss(parallelize, lambda output, given: state["criterion"](output, given), change)


def _by_the_file(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return by_row(output, given).max() if HARDEST else by_row(output, given).mean()


@program(PARTS, but="cp", whole=True)
def a_mode_of_the_file(parallelize: Parallelize) -> Result:
    """A variable of the script's file."""

    def change(to: bool = True) -> None:
        global HARDEST
        HARDEST = to

    try:
        return with_loss(parallelize, _by_the_file, change)
    finally:
        change(to=False)


@program(PARTS, but="cp", whole=True)
def a_weight_in_a_tensor(parallelize: Parallelize) -> Result:
    """`weight.fill_(0.5)`, which a loss closes over."""
    weight = torch.zeros((), dtype=torch.float64)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) + weight * by_row(output, given).max()

    return with_loss(parallelize, loss, lambda: weight.fill_(0.5) and None)


@program(PARTS, but="cp", whole=True)
def a_step_counted_by_the_script(parallelize: Parallelize) -> Result:
    """From the third step on the hardest row counts."""
    step = 0

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return by_row(output, given).mean() if step < 2 else by_row(output, given).max()

    def change() -> None:
        nonlocal step
        step += 1

    return with_loss(parallelize, loss, change, steps=4)


@program(PARTS, but="cp", whole=True)
def rows_that_meet_by_a_configuration(parallelize: Parallelize) -> Result:
    """`model.config.centred = True`: the mean over the batch is taken off."""

    @dataclass
    class Config:
        centred: bool = False

    class Centred(Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            if self.config.centred:
                hidden = hidden - hidden.mean(0, keepdim=True)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(self.norm(hidden))

    model = Centred().double()
    engine = start(parallelize, model)
    return trained(engine, between=lambda _: setattr(model.config, "centred", True))


class Wide(nn.Module):
    """A block whose channels may be made to see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
        self.shares = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        if self.shares:
            hidden = hidden / (1 + hidden.pow(2).sum(-1, keepdim=True))
        return x + self.down(hidden)


@program(CUT)
def channels_that_meet_later(parallelize: Parallelize) -> Result:
    """`block.shares = True`: a norm over channels that tp has cut."""
    return with_blocks(parallelize, Wide, lambda each: setattr(each, "shares", True))


@program(CUT)
def an_activation_of_all_channels(parallelize: Parallelize) -> Result:
    """`block.act = nn.Softmax(-1)`."""
    return with_blocks(parallelize, Wide, lambda each: setattr(each, "act", nn.Softmax(-1)))


@program()
def channels_that_meet_in_evaluation(parallelize: Parallelize) -> Result:
    """A forward that centres channels in evaluation mode alone: these layers stay whole."""

    class Centred(Wide):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.act(self.up(x))
            return x + self.down(hidden if self.training else hidden - hidden.mean(-1, keepdim=True))

    engine = start(parallelize, small_net(block=Centred))
    return trained(engine, between=lambda step: {f"held out {step}": engine.evaluate(batch(9))})


@program({"cp": f"{SET} Net: a part of a sequence gives other numbers", "sp": f"{SET} nothing can be shared out"})
def tokens_that_meet_later(parallelize: Parallelize) -> Result:
    """`block.shifts = True`: each token sees the one before."""

    class Shifting(Block):
        shifts = False

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            before = torch.cat([torch.zeros_like(made[:, :1]), made[:, :-1]], 1)
            return made + before if self.shifts else made

    return with_blocks(parallelize, Shifting, lambda each: setattr(each, "shifts", True))


@program({**AWAY, "tp": f"{SET} embed cannot be cut"})
def anothers_weight_read_later(parallelize: Parallelize) -> Result:
    """`block.tied = True`: a block reads the root's embedding from then on."""

    class Knowing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.root: list[Net] = []
            self.tied = False

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return made + 0.1 * self.root[0].embed.weight.mean(0) if self.tied else made

    model = small_net(block=Knowing)
    for each in model.layers:
        each.root.append(model)
    engine = start(parallelize, model)

    def between(_: int) -> None:
        for each in model.layers:
            each.tied = True

    return trained(engine, between=between)


@dataclass(slots=True)
class Settings:
    contrast: float = 0.0


@program(PARTS, but="cp", whole=True)
def contrast_in_slots_that_begins_later(parallelize: Parallelize) -> Result:
    """A dataclass with slots has the weight."""
    settings = Settings()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        each = output.mean(1)
        return cross_entropy(output, given) + settings.contrast * (each @ each.T).square().mean()

    return with_loss(parallelize, loss, lambda: setattr(settings, "contrast", 0.5))


@program(
    {"pp": r"skipped \(\(1,\), then \(0,\)\) .* stage 1 needs what embed of another stage returns"},
    but="cp,sp",
    whole=True,
)
def blocks_left_out_by_turns(parallelize: Parallelize) -> Result:
    """All blocks are called, and the output of those in `model.skipped` is not used."""

    class Skips(Net):
        skipped: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            for number, layer in enumerate(self.layers):
                made = layer(hidden)
                hidden = hidden if number in self.skipped else made
            return self.head(self.norm(hidden))

    model: Any = Skips().double()
    model.skipped = ()
    turns = iter([(1,), (0,), ()])

    def between(_: int) -> None:
        model.skipped = next(turns)

    return trained(start(parallelize, model), between=between)


REPLACED = dict.fromkeys(("pp", "tp", "cp", "ep"), "the forward of Net was replaced once the engine was there")


@program(REPLACED)
def a_forward_of_another_kind_later(parallelize: Parallelize) -> Result:
    """`model.forward = MethodType(...)`, which hands the first layer's states on to the head."""
    model = small_net()
    engine = start(parallelize, model)

    def skipping(self: Net, x: Tensor) -> Tensor:
        first = self.layers[0](self.embed(x))
        return self.head(self.norm(self.layers[1](first) + first))

    def change(step: int) -> None:
        if step == 0:
            model.forward = MethodType(skipping, model)

    return trained(engine, between=change)
