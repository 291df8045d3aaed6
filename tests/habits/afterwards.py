"""What is done to a module once its engine is there: hooks of loggers, forwards put in place, steps that raised."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,method-assign,assignment,union-attr,arg-type,operator"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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

#: A logger's hook is given what a rank has: the gradients of some rows, or of a part of a layer.
LATE = {
    "tp": "registered once the engine was there",
    **dict.fromkeys(("dp", "cp", "microbatches"), "would see the gradients of some rows"),
}
CUT = {"tp": "registered once the engine was there"}
#: Weights that a rank has a piece, a part or none of.
AWAY = dict.fromkeys(("zero=3", "tp", "pp", "offload.parameters"), "cannot be read or written on this rank")
NO_GRADIENT = {
    **dict.fromkeys(("dp", "cp", "offload.optimizer"), "is written between steps"),
    **dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp", "pp", "offload.parameters"), "is not here"),
}


@program(LATE)
def gradients_watched_by_a_logger(parallelize: Parallelize) -> Result:
    """`wandb.watch(model)` behind the engine: a hook on every parameter, which looks at its gradient's norm."""
    model, seen = small_net(), {}
    engine = start(parallelize, model)
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.register_hook(lambda gradient, name=name: seen.update({name: float(gradient.norm())}))
    found = trained(engine)
    return {**found, **{f"norm of {name}": each for name, each in seen.items()}}


@program(CUT)
def gradients_masked_later(parallelize: Parallelize) -> Result:
    """A hook that keeps rows of an embedding as they are, registered behind the engine."""
    model = small_net()
    engine = start(parallelize, model)
    mask = torch.ones(12, 1, dtype=torch.float64)
    mask[6:] = 0
    model.embed.weight.register_hook(lambda gradient: gradient * mask)
    return trained(engine)


@program(CUT)
def activations_changed_by_a_later_hook(parallelize: Parallelize) -> Result:
    """A forward hook on a linear layer, registered behind the engine, that counts channels."""
    model = small_net()
    engine = start(parallelize, model)
    for layer in model.layers:
        layer.up.register_forward_hook(lambda _, __, made: made / made.shape[-1] ** 0.5)
    return trained(engine)


@program()
def activations_watched_by_a_later_hook(parallelize: Parallelize) -> Result:
    """The same that only looks at blocks."""
    model, seen = small_net(), []
    engine = start(parallelize, model)
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, made: seen.append(made.shape[-1]))
    return trained(engine)


@program()
def a_forward_put_in_place_later(parallelize: Parallelize) -> Result:
    """`layer.forward = ...` behind the engine, around the one it had."""
    model = small_net()
    engine = start(parallelize, model)
    for layer in model.layers:
        own = layer.forward
        layer.forward = lambda x, own=own: 0.5 * own(x)
    return trained(engine)


@program(CUT)
def a_linear_forward_put_in_place_later(parallelize: Parallelize) -> Result:
    """The same on a linear layer, whose channels it counts."""
    model = small_net()
    engine = start(parallelize, model)
    for layer in model.layers:
        own = layer.up.forward
        layer.up.forward = lambda x, own=own: own(x).softmax(-1)
    return trained(engine)


@program()
def an_activation_exchanged_later(parallelize: Parallelize) -> Result:
    """`block.act = nn.GELU()` between steps: a submodule without parameters."""

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act: nn.Module = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    model = small_net(block=Own)
    engine = start(parallelize, model)
    found = {"before": engine.train_step(batch(9))}
    for layer in model.layers:
        layer.act = nn.ReLU()
    return {**found, **trained(engine)}


@program(AWAY)
def initialised_behind_the_engine(parallelize: Parallelize) -> Result:
    """`model.apply(init)` once the engine is there."""
    model = small_net()
    engine = start(parallelize, model)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)

    model.apply(init)
    return trained(engine)


@program({"all": "a bad batch"})
def a_step_that_raised(parallelize: Parallelize) -> Result:
    """The loss raises for one batch, and the loop goes on with the next."""
    bad = {"is": False}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        if bad["is"]:
            raise ValueError("a bad batch")
        return cross_entropy(output, given)

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))
    found = {"first": engine.train_step(batch(5))}
    bad["is"] = True
    try:
        engine.train_step(batch(6))
    except ValueError:
        found["raised"] = 1.0
    bad["is"] = False
    return {**found, **trained(engine)}


@program()
def a_step_without_numbers(parallelize: Parallelize) -> Result:
    """A loss that is NaN once, and set to nothing by `nan_to_num` in the loss."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        found = cross_entropy(output, given)
        return found if torch.isfinite(found) else found.detach().nan_to_num() * 0 + (output * 0).sum()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def dropout_turned_off_by_its_number(parallelize: Parallelize) -> Result:
    """`module.p = 0.0` before the first step, for all of the model's dropouts."""

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    model = small_net(block=Own)
    engine = start(parallelize, model)
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return trained(engine)


@program(NO_GRADIENT)
def gradients_clipped_by_value_behind_the_step(parallelize: Parallelize) -> Result:
    """`clip_grad_value_` and a norm of all, behind `train_step`, out of habit."""
    model = small_net()
    engine = start(parallelize, model)

    def between(_: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    return trained(engine, between=between)


@program()
def deterministic_algorithms(parallelize: Parallelize) -> Result:
    """`use_deterministic_algorithms(True)`."""
    torch.use_deterministic_algorithms(True)
    try:
        return trained(start(parallelize, small_net()))
    finally:
        torch.use_deterministic_algorithms(False)


@program()
def a_default_device(parallelize: Parallelize) -> Result:
    """`torch.set_default_device("cpu")`, which puts a mode around every function."""
    torch.set_default_device("cpu")
    try:
        return trained(start(parallelize, small_net()))
    finally:
        torch.set_default_device(None)


class Logging(Block):
    """As Lightning's `self.log`: numbers in a dictionary that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.logged["norm"] = made.detach().norm()
        self.logged["mean"] = made.mean().item()
        return made


@program()
def numbers_logged_by_blocks(parallelize: Parallelize) -> Result:
    """`self.logged["norm"] = ...` in each forward."""
    return trained(start(parallelize, small_net(block=Logging)))


class Exchanged(Net):
    """A head that is chosen by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Linear(8, 12)})
        self.task = "a"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.heads[self.task](self.norm(hidden))


@program(dict.fromkeys(("pp", "zero=3", "tp", "cp"), "which units run depends"))
def a_head_chosen_between_steps(parallelize: Parallelize) -> Result:
    """`model.task = "b"`, set by the script on all ranks."""
    model = Exchanged().double()
    model.head = nn.Identity()
    engine = start(parallelize, model)

    def between(step: int) -> None:
        model.task = "ab"[(step + 1) % 2]

    return trained(engine, steps=4, between=between)


@program(dict.fromkeys(("pp", "zero=3", "offload.parameters"), "which units run depends|which is not there for it"))
def depth_that_grows(parallelize: Parallelize) -> Result:
    """Progressive stacking: `model.depth` says how many blocks are run."""

    class Growing(Net):
        depth = 1

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            for layer in self.layers[: self.depth]:
                hidden = layer(hidden)
            return self.head(self.norm(hidden))

    model = Growing().double()
    engine = start(parallelize, model)

    def between(step: int) -> None:
        model.depth = 2 if step >= 1 else 1

    return trained(engine, steps=4, between=between)


@program(only="pp", always=True)
def a_state_kept_over_steps(parallelize: Parallelize) -> Result:
    """`best = engine.state_dict()`, and a few steps more: it is of one moment, on all stages."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    best = engine.state_dict()
    engine.train_step(batch(1))
    return best
