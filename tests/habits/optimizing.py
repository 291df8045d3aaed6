"""Optimizers as scripts make them: rarer ones of torch, subclasses, patched steps, and hooks that see every step."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,method-assign,assignment,arg-type,misc"

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.habits.harness import Parallelize, Result, batch, program, small_net, start, trained

#: Where an optimizer is given pieces, it must be known to work elementwise.
NOT_KNOWN = dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp"), "can update a piece by itself is not known")
#: And what looks at all of a step must be given all of the parameters.
LOOKS = dict.fromkeys(
    ("zero=1", "zero=2", "zero=3", "tp", "pp", "offload.optimizer", "offload.parameters"),
    "and not whole parameters and gradients",
)


def made_by(kind: Any, **settings: Any) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda parameters: kind(parameters, **settings)


@program()
def adamax_and_its_largest_gradients(parallelize: Parallelize) -> Result:
    """`Adamax`."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.Adamax, lr=1e-2, eps=1e-4)))


@program()
def adadelta_without_a_rate(parallelize: Parallelize) -> Result:
    """`Adadelta`."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.Adadelta, eps=1e-3)))


@program()
def radam_from_its_first_step(parallelize: Parallelize) -> Result:
    """`RAdam`, which begins without its second moment."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.RAdam, lr=1e-2, eps=1e-4)), steps=7)


@program()
def averaged_sgd(parallelize: Parallelize) -> Result:
    """`ASGD`."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.ASGD, lr=0.1, t0=1)))


@program()
def signs_of_gradients(parallelize: Parallelize) -> Result:
    """`Rprop`: the size of a step follows signs alone."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.Rprop, lr=1e-3)))


@program()
def nesterov_over_many_tensors(parallelize: Parallelize) -> Result:
    """`foreach=True` and `nesterov=True`."""
    make = made_by(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True)
    return trained(start(parallelize, small_net(), make))


@program()
def a_fused_adamw(parallelize: Parallelize) -> Result:
    """`fused=True`, on the CPU too."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True)))


@program()
def adafactor_of_torch(parallelize: Parallelize) -> Result:
    """Its second moment is of rows and columns: it must see matrices."""
    return trained(start(parallelize, small_net(), made_by(torch.optim.Adafactor, lr=1e-2)))


@program()
def a_partial_of_an_optimizer(parallelize: Parallelize) -> Result:
    """As Hydra and others write a factory."""
    return trained(start(parallelize, small_net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9)))


@program()
def an_optimizer_class_alone(parallelize: Parallelize) -> Result:
    """The class itself is a factory."""
    return trained(start(parallelize, small_net(), torch.optim.SGD))


class Centred(torch.optim.SGD):
    """Gradient centralization: each row of a gradient loses its mean."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each.dim() > 1:
                    each.grad.sub_(each.grad.mean(1, keepdim=True))
        return super().step(closure)


@program(NOT_KNOWN)
def centred_gradients_by_a_subclass(parallelize: Parallelize) -> Result:
    """A subclass of SGD that changes gradients before its step."""
    return trained(start(parallelize, small_net(), made_by(Centred, lr=0.1)))


class Logged(torch.optim.AdamW):
    """A subclass that only counts its steps."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().step(closure)


@program(NOT_KNOWN)
def steps_counted_by_a_subclass(parallelize: Parallelize) -> Result:
    """A subclass of AdamW whose update is its own."""
    return trained(start(parallelize, small_net(), made_by(Logged, lr=1e-2, eps=1e-4)))


def patched(change: Callable[[Tensor], Tensor]) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """SGD whose `step` on the object changes gradients first."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        own = optimizer.step

        def step(closure: Any = None) -> Any:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.copy_(change(each.grad))
            return own(closure)

        optimizer.step = step
        return optimizer

    return make


@program(LOOKS)
def a_step_put_in_its_place(parallelize: Parallelize) -> Result:
    """`optimizer.step = ...` in the factory: each gradient is made as long as 1."""
    return trained(start(parallelize, small_net(), patched(lambda gradient: gradient / gradient.norm())))


@program(LOOKS)
def a_step_put_in_its_place_later(parallelize: Parallelize) -> Result:
    """The same on the engine's optimizer."""
    engine = start(parallelize, small_net(), made_by(torch.optim.SGD, lr=0.1))
    for optimizer in engine.optimizers:
        own = optimizer.step

        def step(closure: Any = None, optimizer: Any = optimizer, own: Any = own) -> Any:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.div_(each.grad.norm())
            return own(closure)

        optimizer.step = step
    return trained(engine)


@program(LOOKS)
def a_hook_of_every_optimizer(parallelize: Parallelize) -> Result:
    """`register_optimizer_step_pre_hook`, for all of the process: gradients as long as 1."""

    def shorten(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.div_(each.grad.norm())

    handle = register_optimizer_step_pre_hook(shorten)
    try:
        return trained(start(parallelize, small_net(), made_by(torch.optim.SGD, lr=0.1)))
    finally:
        handle.remove()


@program()
def a_scheduler_after_a_scheduler(parallelize: Parallelize) -> Result:
    """`SequentialLR`: a warm-up, then a cosine."""
    engine = start(parallelize, small_net(), made_by(torch.optim.SGD, lr=0.1))
    each = torch.optim.lr_scheduler
    schedulers = [
        each.SequentialLR(
            optimizer,
            [each.LinearLR(optimizer, 0.1, total_iters=2), each.CosineAnnealingLR(optimizer, 4)],
            milestones=[2],
        )
        for optimizer in engine.optimizers
    ]

    def between(_: int) -> None:
        for scheduler in schedulers:
            scheduler.step()

    return trained(engine, steps=4, between=between)


@program()
def momentum_by_a_scheduler_of_ones_own(parallelize: Parallelize) -> Result:
    """`group["momentum"]` and `group["weight_decay"]` written between steps."""
    engine = start(parallelize, small_net(), made_by(torch.optim.SGD, lr=0.1, momentum=0.5))

    def between(step: int) -> None:
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["momentum"], group["weight_decay"] = 0.5 + 0.1 * step, 0.01 * step

    return trained(engine, between=between)


@program()
def decay_by_the_kind_of_module(parallelize: Parallelize) -> Result:
    """minGPT: what to decay is asked of the modules that have it."""
    model = small_net()
    decayed = {id(each.weight) for each in model.modules() if isinstance(each, nn.Linear)}

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        groups = [
            {"params": [each for each in every if (id(each) in decayed) == wanted], "weight_decay": 0.1 * wanted}
            for wanted in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)

    return trained(start(parallelize, model, make))


@program()
def the_optimizers_own_state_put_back(parallelize: Parallelize) -> Result:
    """The optimizer's own `state_dict()` saved and loaded between steps."""
    engine = start(parallelize, small_net(), made_by(torch.optim.AdamW, lr=1e-2, eps=1e-4))
    engine.train_step(batch(9))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in engine.optimizers]
    engine.train_step(batch(8))
    for optimizer, each in zip(engine.optimizers, saved, strict=True):
        optimizer.load_state_dict(each)
    return trained(engine)


class Lamb(Optimizer):
    """Its step clips by the norm of all gradients."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each, _ in every]).norm()
        for each, group in every:
            each.sub_(each.grad / norm, alpha=group["lr"])
        return closure


@program(
    {**NOT_KNOWN, **dict.fromkeys(("pp", "offload.optimizer", "offload.parameters"), "depends on others")}, always=True
)
def a_norm_of_all_in_a_step(parallelize: Parallelize) -> Result:
    """LAMB: on a stage it would be the norm of that stage."""
    return trained(start(parallelize, small_net(), Lamb))


class Scaled(torch.optim.Optimizer):
    """Gradient descent with a rate of each parameter, in an attribute of it."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-group["lr"] * getattr(each, "lr_scale", 1.0))


@program({"tp": "is not known", "zero": "is not known"})
def a_rate_in_an_attribute_that_a_step_reads(parallelize: Parallelize) -> Result:
    """muP by hand: `p.lr_scale`, which an optimizer of one's own reads in its step."""
    model = small_net()
    for each in model.parameters():
        each.lr_scale = 1 / each.shape[-1] if each.dim() == 2 else 1.0  # type: ignore[attr-defined]
    return trained(start(parallelize, model, Scaled))


class ScaledByTable(Scaled):
    """The same by a dictionary of parameters."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        every = [each for group in self.param_groups for each in group["params"]]
        self.scales = {each: 0.1 if each.dim() == 2 else 1.0 for each in every}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.lr_scale = self.scales.get(each, 1.0)
        super().step(closure)


@program(
    {
        "tp": "is not known",
        "zero": "is not known",
        "pp": "scales keeps",
        "offload.parameters": "scales keeps",
        "offload.optimizer": "scales keeps",
    }
)
def a_rate_by_a_dictionary_that_a_step_reads(parallelize: Parallelize) -> Result:
    """A step that looks its parameters up among those that it was made with."""
    return trained(start(parallelize, small_net(), ScaledByTable))
