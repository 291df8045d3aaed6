"""What a script switches between steps, wherever that is kept: read by hooks, by methods, in configurations."""

import enum
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Block, Parallelize, Result, program, sgd, small_net, start, trained

#: Where rows, or tokens, are computed apart: `sp` cuts along the rows of these batches.
INSIDE = dict.fromkeys(("dp", "microbatches", "sp"), r"was set since the engine was made, and with it")
#: The same behind the blocks, and of what a backward makes of a gradient.
BEHIND = dict.fromkeys(("dp", "microbatches"), r"was set since the engine was made, and with it")


def points(seed: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        "labels": torch.randint(5, (rows,), generator=generator),
    }


class Rows(nn.Module):
    """Blocks over rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 5)

    def hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.hidden(x))
        return scores


def of_rows(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, given["labels"])


def centred(hidden: Tensor) -> Tensor:
    return hidden - hidden.mean(0)


def switched(
    parallelize: Parallelize, module: nn.Module, switch: Callable[[], Any], loss: Callable[..., Any] = of_rows
) -> Result:
    """Four steps, of which the last two begin after the switch."""
    engine = parallelize(module.double(), loss=loss, optimizer=sgd, example=points(0))
    found = {}
    for step in range(4):
        if step == 2:
            switch()
        found[f"loss {step}"] = engine.train_step(points(step))
    return found | dict(engine.state_dict())


@program(INSIDE, but="cp")
def a_forward_hook_with_a_flag(parallelize: Parallelize) -> Result:
    """`block.register_forward_hook(lambda ...: centred(o) if flags["on"] else o)`."""
    model, flags = Rows(), {"on": False}
    model.blocks[0].register_forward_hook(lambda _, __, made: centred(made) if flags["on"] else made)
    return switched(parallelize, model, lambda: flags.update(on=True))


class Hook:
    is_on = False

    def __call__(self, module: nn.Module, given: Any) -> Any:
        del module
        return (centred(given[0]),) if self.is_on else None

    def after(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
        del module, given
        return centred(made) if self.is_on else made


@program(INSIDE, but="cp", always=True)
def an_object_that_is_a_hook(parallelize: Parallelize) -> Result:
    """A forward pre-hook with an attribute that the script sets."""
    model, hook = Rows(), Hook()
    model.blocks[1].register_forward_pre_hook(hook)
    return switched(parallelize, model, lambda: setattr(hook, "is_on", True))


@program(INSIDE, but="cp")
def a_method_that_is_a_hook(parallelize: Parallelize) -> Result:
    """The attribute is that of the object whose method it is."""
    model, hook = Rows(), Hook()
    model.blocks[0].register_forward_hook(hook.after)
    return switched(parallelize, model, lambda: setattr(hook, "is_on", True))


@program(BEHIND, but="cp")
def a_backward_hook_with_a_flag(parallelize: Parallelize) -> Result:
    """Gradients of a block are normalised from some step on."""
    model, flags = Rows(), {"on": False}

    def normalised(_: nn.Module, given: Any, __: Any) -> Any:
        return (given[0] / given[0].norm(),) if flags["on"] else None

    model.blocks[0].register_full_backward_hook(normalised)
    return switched(parallelize, model, lambda: flags.update(on=True))


def hooked(parameter: Any, hook: Callable[[Tensor], Tensor]) -> None:
    parameter.register_hook(hook)


@program(BEHIND, but="cp", always=True)
def a_hook_of_a_parameter_with_a_flag(parallelize: Parallelize) -> Result:
    """Gradients are clamped from some step on; before that the hook is linear."""
    model, flags = Rows(), {"on": False}
    for each in model.parameters():
        hooked(each, lambda found: found.clamp(-1e-3, 1e-3) if flags["on"] else found)
    return switched(parallelize, model, lambda: flags.update(on=True))


@program(but="cp")
def a_hook_of_a_parameter_with_a_factor(parallelize: Parallelize) -> Result:
    """It stays linear, so the new factor counts."""
    model, factors = Rows(), {"stem": 1.0}
    for each in model.stem.parameters():
        hooked(each, lambda found: found * factors["stem"])
    return switched(parallelize, model, lambda: factors.update(stem=0.25))


@program(BEHIND, but="cp")
def a_limit_that_a_parameter_has(parallelize: Parallelize) -> Result:
    """The hook reads an attribute of its parameter."""
    model = Rows().double()
    weight: Any = model.stem.weight
    weight.limit = None
    weight.register_hook(lambda found: found if weight.limit is None else found.clamp(-weight.limit, weight.limit))
    return switched(parallelize, model, lambda: setattr(weight, "limit", 1e-3))


@program(BEHIND, but="cp")
def a_backward_of_a_function_with_a_flag(parallelize: Parallelize) -> Result:
    """`autograd.Function`, whose backward reads a dictionary of the script."""
    limits: dict[str, float | None] = {"norm": None}

    class Limited(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, found: Tensor) -> Tensor:
            del ctx
            return found if limits["norm"] is None else found / found.norm() * limits["norm"]

    class Limits(Rows):
        def hidden(self, x: Tensor) -> Tensor:
            function: Any = Limited
            made: Tensor = function.apply(super().hidden(x))
            return made

    return switched(parallelize, Limits(), lambda: limits.update(norm=0.01))


class Mode(enum.Enum):
    PLAIN = "plain"
    CENTRED = "centred"


@dataclass(frozen=True)
class Settings:
    is_centred: bool = False


class Configured(Rows):
    """What it does is said by a member of an enum, a configuration, or one inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.settings = Mode.PLAIN, Settings()
        self.config: dict[str, Any] = {"model": {"norm": {"on": False}}, "act": torch.tanh, "dtype": torch.float64}

    def is_centred(self) -> bool:
        is_on: bool = self.config["model"]["norm"]["on"]
        return is_on or self.mode is Mode.CENTRED or self.settings.is_centred

    def hidden(self, x: Tensor) -> Tensor:
        made = super().hidden(x)
        return centred(made) if self.is_centred() else made


@program(BEHIND, but="cp", always=True)
def a_mode_of_an_enum(parallelize: Parallelize) -> Result:
    """`model.mode = Mode.CENTRED`."""
    model = Configured()
    return switched(parallelize, model, lambda: setattr(model, "mode", Mode.CENTRED))


@program(BEHIND, but="cp")
def another_configuration(parallelize: Parallelize) -> Result:
    """`model.settings = replace(model.settings, ...)` of a frozen dataclass."""
    model = Configured()
    return switched(parallelize, model, lambda: setattr(model, "settings", replace(model.settings, is_centred=True)))


@program(BEHIND, but="cp")
def a_configuration_in_a_configuration(parallelize: Parallelize) -> Result:
    """`model.config["model"]["norm"]["on"] = True`."""
    model = Configured()
    return switched(parallelize, model, lambda: model.config["model"]["norm"].update(on=True))


CONTEXT: ContextVar[bool] = ContextVar("CONTEXT", default=False)
NAMES: set[str] = set()


class Registry:
    modes: dict[str, bool] = {}  # noqa: RUF012 - one for all, as registries are


def as_at_first() -> None:
    CONTEXT.set(False)
    NAMES.clear()
    Registry.modes.clear()


class Reading(Rows):
    """Its method reads what no forward names."""

    def hidden(self, x: Tensor) -> Tensor:
        made = super().hidden(x)
        return centred(made) if CONTEXT.get() or "centred" in NAMES or Registry.modes.get("centred") else made


@program(BEHIND, but="cp")
def a_context_variable(parallelize: Parallelize) -> Result:
    """`CONTEXT.set(True)`, which a method of the module asks for."""
    as_at_first()
    return switched(parallelize, Reading(), lambda: CONTEXT.set(True))


@program(BEHIND, but="cp")
def a_set_of_names(parallelize: Parallelize) -> Result:
    """`NAMES.add(...)`."""
    as_at_first()
    return switched(parallelize, Reading(), lambda: NAMES.add("centred"))


@program(BEHIND, but="cp")
def a_registry_in_a_class(parallelize: Parallelize) -> Result:
    """`Registry.modes[...] = True`."""
    as_at_first()
    return switched(parallelize, Reading(), lambda: Registry.modes.update(centred=True))


@program(BEHIND, but="cp")
def a_forward_in_the_place_of_another_with_a_flag(parallelize: Parallelize) -> Result:
    """`block.forward = lambda x: ...` before the engine is made."""
    model, flags = Rows(), {"on": False}
    block: Any = model.blocks[0]
    before = block.forward
    block.forward = lambda x: centred(before(x)) if flags["on"] else before(x)
    return switched(parallelize, model, lambda: flags.update(on=True))


@program(dict.fromkeys(("dp", "microbatches"), r"terms.0 .* was set"), but="cp", always=True)
def a_term_that_is_appended(parallelize: Parallelize) -> Result:
    """Terms of a loss in a list, to which a script adds one."""
    terms: list[Callable[[Tensor], Tensor]] = []

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        made = of_rows(output, given)
        for term in terms:
            made = made + term(output)
        return made

    return switched(parallelize, Rows(), lambda: terms.append(lambda output: output.mean(0).pow(2).sum()), loss)


class Spread(nn.Module):
    def forward(self, output: Tensor) -> Tensor:
        return output.mean(0).pow(2).sum()


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList()

    def forward(self, output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        made = of_rows(output, given)
        for term in self.terms:
            made = made + term(output)
        return made


@program(dict.fromkeys(("dp", "microbatches"), r"terms.0 .* was set"), but="cp")
def a_module_that_a_criterion_is_given(parallelize: Parallelize) -> Result:
    """The same in an `nn.ModuleList` of a criterion."""
    criterion = Terms()
    return switched(parallelize, Rows(), lambda: criterion.terms.append(Spread()), criterion)


class Acting(Block):
    def act(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return made


@program({"tp": r"Acting.act .* was set"})
def a_method_of_a_class_in_the_place_of_another(parallelize: Parallelize) -> Result:
    """`Block.act = ...`, a softmax over channels."""
    kind: Any = type("Acting", (Acting,), {"__module__": __name__})

    def switch(step: int) -> None:
        if step == 1:
            kind.act = lambda _, hidden: hidden.softmax(-1)

    return trained(start(parallelize, small_net(block=kind)), steps=4, between=switch)
