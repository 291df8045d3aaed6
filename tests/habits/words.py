"""What a batch says beside its rows (a task, a phase, a depth), what `args` and other files say, and layers that are
left out at random."""
# Programs as users write them.
# mypy: disable-error-code="override,no-any-return,attr-defined"

import random
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Block, Net, Parallelize, Result, batch, cross_entropy, program, sgd, trained

#: Where weights come by units, and where ranks compute units together.
ORDERED = dict.fromkeys(("pp", "zero=3", "tp", "cp"), "which units run depends|a part of a sequence")
PARTS = "a part of a sequence"


def saying(name: str, *values: Any) -> Callable[[int], dict[str, Any]]:
    """Batches that say one thing after the other."""
    return lambda seed: {**batch(seed), name: values[seed % len(values)]}


#: As `parse_args()` gives it; and a file of settings, that others import.
args = Namespace(contrast=0.0)
settings = ModuleType("settings")


def with_negatives(output: Tensor, given: Mapping[str, Any], weight: float) -> Tensor:
    """Rows of the batch are negatives, if their weight is not 0."""
    found = cross_entropy(output, given)
    if not weight:
        return found
    rows = functional.normalize(output.mean(1), dim=-1)
    return found + weight * functional.cross_entropy(rows @ rows.T * 5, torch.arange(len(rows)))


def fit(
    parallelize: Parallelize, model: nn.Module, make: Callable[[int], dict[str, Any]], loss: Any = cross_entropy
) -> Result:
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(4)}
    return {**found, **engine.state_dict()}


class Told(Net):
    """Is told what its loss is told, and does not ask."""

    def forward(self, x: Tensor, phase: str) -> Tensor:
        del phase
        return super().forward(x)


@program(dict.fromkeys(("dp", "microbatches"), "batch.'phase'.*neither their mean by rows") | {"cp": PARTS}, whole=True)
def negatives_in_a_phase(parallelize: Parallelize) -> Result:
    """`if batch["phase"] == "contrast":` rows of the batch are negatives."""

    def loss(output: Tensor, given: Mapping[str, Any]) -> Tensor:
        return with_negatives(output, given, float(given["phase"] == "contrast"))

    return fit(parallelize, Told(), saying("phase", "plain", "contrast"), loss)


@program({"cp": PARTS}, whole=True)
def a_sum_in_a_phase(parallelize: Parallelize) -> Result:
    """`reduction=batch["phase"]`: a mean, a sum, and a mean again."""

    def loss(output: Tensor, given: Mapping[str, Any]) -> Tensor:
        found = functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction=given["phase"])
        return found * (0.01 if given["phase"] == "sum" else 1.0)

    return fit(parallelize, Told(), saying("phase", "mean", "sum"), loss)


class Phased(Net):
    def forward(self, x: Tensor, phase: str) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden - hidden.mean(0) if phase == "centre" else hidden
        return self.head(self.norm(hidden))


@program(dict.fromkeys(("dp", "microbatches"), "batch.'phase'.*see each other|neither their mean by rows"), whole=True)
def rows_centred_in_a_phase(parallelize: Parallelize) -> Result:
    """`if phase == "centre":` the mean of the batch is taken off."""
    return fit(parallelize, Phased(), saying("phase", "plain", "centre"))


class Gated(Block):
    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden * hidden.mean(-1, keepdim=True) if gated else hidden)


class GatedNet(Net):
    def forward(self, x: Tensor, gated: bool) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, gated)
        return self.head(self.norm(hidden))


@program({"tp": "batch.'gated'.*cannot be cut"}, always=True)
def channels_that_meet_if_told_so(parallelize: Parallelize) -> Result:
    """`forward(x, gated)`: with `True` each channel sees the mean of all."""
    return fit(parallelize, GatedNet(block=Gated), saying("gated", False, True))


class Reading(Net):
    def forward(self, x: Tensor, reads: int) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        if reads:
            hidden = hidden + self.get_parameter("layers.0.up.weight").mean()
        return self.head(self.norm(hidden))


@program(dict.fromkeys(("zero=3", "pp", "offload.parameters", "tp"), "batch.'reads'.*(not there for it|cannot be cut)"))
def a_weight_that_is_read_if_told_so(parallelize: Parallelize) -> Result:
    """A number in the batch has another module's weight read."""
    return fit(parallelize, Reading(), saying("reads", 0, 1))


def set_later(parallelize: Parallelize, model: nn.Module, change: Callable[[], Any], loss: Any) -> Result:
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=batch(0))
    return trained(engine, between=lambda step: change() if step == 0 else None)


@program(dict.fromkeys(("dp", "microbatches"), "args.contrast .*was set since.*neither") | {"cp": PARTS}, whole=True)
def a_weight_in_args_set_later(parallelize: Parallelize) -> Result:
    """`args.contrast = 0.5` after a warm-up."""
    args.contrast = 0.0
    return set_later(
        parallelize, Net(), lambda: setattr(args, "contrast", 0.5),
        lambda output, given: with_negatives(output, given, args.contrast),
    )  # fmt: skip


class Set(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden * hidden.mean(-1, keepdim=True) if settings.gated else hidden)


@program({"tp": "settings.gated .*was set since.*cannot be cut"}, always=True)
def a_mode_of_another_file_set_later(parallelize: Parallelize) -> Result:
    """`settings.gated = True`, and blocks read it there."""
    settings.gated = False
    return set_later(parallelize, Net(block=Set), lambda: setattr(settings, "gated", True), cross_entropy)


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * settings.scale)


class Around(Net):
    def forward(self, x: Tensor) -> Tensor:
        settings.scale = 0.5
        hidden = self.layers[0](self.embed(x))
        settings.scale = 1.0
        return self.head(self.norm(self.layers[1](hidden)))


@program(only="recompute", always=True)
def a_flag_of_another_file_around_a_block(parallelize: Parallelize) -> Result:
    """`settings.scale` is set for one block, and put back before its backward."""
    settings.scale = 1.0
    return trained(parallelize(Around(block=Scaled).double(), loss=cross_entropy, optimizer=sgd, example=batch(0)))


class Drops(Net):
    """LayerDrop."""

    def drawn(self) -> float:
        return float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            if not self.training or self.drawn() > 0.4:
                hidden = layer(hidden)
        return self.head(self.norm(hidden))


def left_out(parallelize: Parallelize, model: nn.Module) -> Result:
    options = {"loss": cross_entropy, "optimizer": sgd, "example": batch(0)}
    return trained(parallelize(model.double(), **options), steps=6)


@program(ORDERED, always=True)
def layers_left_out_at_random(parallelize: Parallelize) -> Result:
    """LayerDrop by `torch.rand`: a layer without a gradient does not decay, and its momentum rests."""
    return left_out(parallelize, Drops())


@program({**ORDERED, "pp": f"{ORDERED['pp']}|draws from Python's"})
def layers_left_out_by_pythons_generator(parallelize: Parallelize) -> Result:
    """The same by `random.random()`, seeded by the script."""

    class Own(Drops):
        def drawn(self) -> float:
            return random.random()

    random.seed(0)
    return left_out(parallelize, Own())


def two_tasks(seed: int) -> dict[str, Any]:
    """Classes, or numbers with which nobody can compute the loss of classes."""
    numbers = torch.randn((4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    is_first = seed < 2
    return {"x": batch(seed)["x"], "labels": batch(seed)["labels"] if is_first else numbers, "task": "ab"[not is_first]}


@program(but="cp,tp", whole=True)
def a_task_whose_targets_are_of_another_type(parallelize: Parallelize) -> Result:
    """Its loss is a mean over rows, and that of the first a mean over labels."""

    def loss(output: Tensor, given: Mapping[str, Any]) -> Tensor:
        if given["task"] == "a":
            return cross_entropy(output, given)
        return functional.mse_loss(output[..., 0], given["labels"])

    return fit(parallelize, Net(), two_tasks, loss)


@program(dict.fromkeys(("dp", "microbatches"), "task.*was set since.*neither"), but="cp,tp", whole=True)
def a_task_in_which_rows_meet(parallelize: Parallelize) -> Result:
    """Similarities of rows, in a batch that the first task cannot be computed of."""

    def loss(output: Tensor, given: Mapping[str, Any]) -> Tensor:
        if given["task"] == "a":
            return cross_entropy(output, given)
        rows, wanted = functional.normalize(output.mean(1), dim=-1), given["labels"].mean(1)
        return functional.mse_loss(rows @ rows.T, torch.outer(wanted, wanted))

    return fit(parallelize, Net(), two_tasks, loss)
