"""Optimizers of one's own: what they count and keep, what they hold, and what a step on a parameter depends on."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,assignment,override,union-attr,operator,attr-defined"

import random
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import shardwise as sw
from tests.habits.harness import Parallelize, Result, program, small_net, start, trained

#: Where an optimizer is given something else than all parameters, whole.
PARTS = ("zero=1", "zero=2", "zero=3", "tp", "pp", "offload.optimizer", "offload.parameters")
COUPLED = dict.fromkeys(PARTS, "to a parameter depends on others")
IN_TURN = dict.fromkeys(("offload.optimizer", "offload.parameters"), r"something from step to step that is not in")
FALSELY = dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp"), "to an element of a parameter depends on others of it")


class Own(Optimizer):
    """Gradient descent, a parameter at a time."""

    def __init__(self, given: Any, lr: float = 0.1) -> None:
        super().__init__(given, {"lr": lr})
        self.begin()

    def begin(self) -> None:
        """What a kind of it has beside."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.one(each, group)

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] * parameter.grad)

    def given(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]


def whole(kind: Any) -> list[sw.Share]:
    """It is said to look at whole parameters."""
    return [sw.Share(make=kind, whole=True)]


def elementwise(kind: Any) -> list[sw.Share]:
    """Every number is said to be treated by itself."""
    return [sw.Share(make=kind, whole=False)]


class Counted(Own):
    """Adam as it is written by hand: one count for all parameters."""

    def begin(self) -> None:
        self.t = 0

    def step(self, closure: Any = None) -> None:
        self.t += 1
        super().step(closure)

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["first"].lerp_(parameter.grad, 0.1)
        state["second"].lerp_(parameter.grad.square(), 0.01)
        size = (state["second"] / (1 - 0.99**self.t)).sqrt() + 1e-3
        parameter.sub_(0.1 * group["lr"] * state["first"] / (1 - 0.9**self.t) / size)


@program()
def steps_counted_for_all_parameters(parallelize: Parallelize) -> Result:
    """`self.t += 1`: with offload, a step of training is several calls of `step`."""
    return trained(start(parallelize, small_net(), elementwise(Counted)), steps=5)


class CountedInGroups(Own):
    """Apex has the count in groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] / group["step"] * parameter.grad)


@program()
def steps_counted_in_groups(parallelize: Parallelize) -> Result:
    """`group["step"] += 1`, which the first step has made."""
    return trained(start(parallelize, small_net(), elementwise(CountedInGroups)), steps=5)


class CountedInAList(Own):
    """What counts is no number."""

    def begin(self) -> None:
        self._seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self._seen.append(1)
        super().step(closure)

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] / len(self._seen) * parameter.grad)


@program(IN_TURN)
def steps_counted_in_a_list(parallelize: Parallelize) -> Result:
    """`self._seen.append(...)`: what tries the optimizer leaves nothing in it."""
    return trained(start(parallelize, small_net(), whole(CountedInAList)))


CALLS = {"steps": 0}


class CountedInTheScript(Own):
    """What counts is a variable of the file."""

    def step(self, closure: Any = None) -> None:
        CALLS["steps"] += 1
        super().step(closure)

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] / CALLS["steps"] * parameter.grad)


@program(IN_TURN)
def steps_counted_in_the_script(parallelize: Parallelize) -> Result:
    """`STEPS["n"] += 1`: what tries the optimizer does not count."""
    CALLS["steps"] = 0
    return trained(start(parallelize, small_net(), whole(CountedInTheScript)))


class Lucky(Own):
    """A rate that Python draws, for each parameter."""

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] * random.uniform(0.5, 1.0) * parameter.grad)


@program(COUPLED)
def rates_drawn_by_python(parallelize: Parallelize) -> Result:
    """All ranks have seeded alike; a rank with other parameters would draw for others."""
    random.seed(0)
    return trained(start(parallelize, small_net(), whole(Lucky)))


class NormNowAndThen(Own):
    """All weights are made shorter together in every fourth step."""

    def begin(self) -> None:
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.t += 1
        if self.t % 4 == 0:
            norm = torch.stack([each.norm() for each in self.given()]).norm()
            for each in self.given():
                each.mul_((2.0 / norm).clamp(max=1.0))


@program(COUPLED)
def a_norm_of_all_now_and_then(parallelize: Parallelize) -> Result:
    """Most steps treat each parameter by itself."""
    return trained(start(parallelize, small_net(), whole(NormNowAndThen)), steps=5)


class Asked(Own):
    """The norm of all gradients, if an attribute or a group says so."""

    is_clipping = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.is_clipping or self.param_groups[0].get("clip"):
            norm = torch.stack([each.grad.norm() for each in self.given()]).norm()
            for each in self.given():
                each.grad.mul_((0.1 / norm).clamp(max=1.0))
        super().step(closure)


@program(COUPLED)
def a_norm_of_all_that_a_group_asks_for(parallelize: Parallelize) -> Result:
    """`group["clip"] = True` after the second step."""

    def between(step: int) -> None:
        for each in engine.optimizers if step == 1 else ():
            each.param_groups[0]["clip"] = True

    engine = start(parallelize, small_net(), whole(Asked))
    return trained(engine, steps=4, between=between)


@program(COUPLED, always=True)
def a_norm_of_all_that_an_attribute_asks_for(parallelize: Parallelize) -> Result:
    """`optimizer.is_clipping = True`."""

    def between(step: int) -> None:
        for each in engine.optimizers if step == 1 else ():
            each.is_clipping = True

    engine = start(parallelize, small_net(), whole(Asked))
    return trained(engine, steps=4, between=between)


class Trusting(Own):
    """A rate by the norm of all gradients, which is 0 in the first steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        norm = torch.stack([each.grad.norm() for each in self.given()]).norm()
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad * group["lr"] / norm)


@program(COUPLED)
def a_rate_of_0_until_a_warm_up(parallelize: Parallelize) -> Result:
    """Steps of a rate of 0 do nothing, whatever they depend on."""

    def between(step: int) -> None:
        for each in engine.optimizers if step == 1 else ():
            each.param_groups[0]["lr"] = 0.1

    engine = start(parallelize, small_net(), [sw.Share(make=lambda given: Trusting(given, lr=0.0), whole=True)])
    return trained(engine, steps=4, between=between)


class Locked(Own):
    """The norm of all gradients, and a lock, which nobody can copy."""

    def begin(self) -> None:
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        with self.lock:
            norm = torch.stack([each.grad.norm() for each in self.given()]).norm()
            for each in self.given():
                each.sub_(0.1 * each.grad / norm)


@program(COUPLED)
def a_norm_of_all_behind_a_lock(parallelize: Parallelize) -> Result:
    """Optimizers hold loggers, files and locks."""
    return trained(start(parallelize, small_net(), whole(Locked)))


class Careful(Own):
    """No step if a gradient is too large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if all(bool(each.grad.abs().max() < 0.15) for each in self.given()):
            super().step(closure)


@program(COUPLED)
def a_step_left_out_for_one_gradient(parallelize: Parallelize) -> Result:
    """A threshold of all gradients, which some pass alone."""
    return trained(start(parallelize, small_net(), whole(Careful)))


class Projected(SGD):
    """Max-norm: rows of a matrix are no longer than 1."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                if each.dim() == 2:
                    each.mul_((1.0 / each.norm(dim=1, keepdim=True)).clamp(max=1.0))


@program(FALSELY)
def rows_of_a_length_said_to_be_elementwise(parallelize: Parallelize) -> Result:
    """A piece of a parameter is no matrix."""
    return trained(start(parallelize, small_net(), elementwise(lambda given: Projected(given, lr=0.1))))


class TrustRatio(Own):
    """LARS: by the norms of a parameter and its gradient."""

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
        parameter.sub_(group["lr"] * 0.1 * ratio * parameter.grad)


@program(FALSELY)
def norms_of_parameters_said_to_be_elementwise(parallelize: Parallelize) -> Result:
    """A rank would have the norm of its piece."""
    return trained(start(parallelize, small_net(), elementwise(TrustRatio)))


class Around(Optimizer):
    """A wrapper, as Accelerate's: groups and state are those of what it wraps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


@program()
def an_optimizer_around_another(parallelize: Parallelize) -> Result:
    """The inner one's momentum is in the state that both have."""
    make = elementwise(lambda given: Around(SGD(given, lr=0.1, momentum=0.9)))
    return trained(start(parallelize, small_net(), make), steps=4)


class Chain(Optimizer):
    """Two optimizers that look like one; each has a state of its own."""

    def __init__(self, *each: Optimizer) -> None:
        self.each, self.defaults, self.state = each, {}, {}
        self.param_groups = [group for one in each for group in one.param_groups]

    def step(self, closure: Any = None) -> None:
        for one in self.each:
            one.step(closure)


def chained(given: Iterable[nn.Parameter]) -> Optimizer:
    parameters = list(given)
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() < 2]
    return Chain(SGD(matrices, lr=0.1, momentum=0.9), Adam(others, lr=1e-2, eps=1e-3))


@program(IN_TURN)
def two_optimizers_in_one(parallelize: Parallelize) -> Result:
    """A chain, as fairseq and many scripts have it."""
    return trained(start(parallelize, small_net(), whole(chained)), steps=4)


class Lookahead(Around):
    """Slow weights in a dictionary of its own, which later steps fill."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.slow: dict[Tensor, Tensor] = {}
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.t += 1
        for each in [each for group in self.param_groups for each in group["params"]] if self.t % 2 == 0 else []:
            slow = self.slow.setdefault(each, each.detach().clone())
            each.copy_(slow.lerp_(each, 0.5))


@program(IN_TURN)
def slow_weights_in_a_dictionary(parallelize: Parallelize) -> Result:
    """Lookahead around an optimizer."""
    return trained(start(parallelize, small_net(), whole(lambda given: Lookahead(SGD(given, lr=0.1)))), steps=5)


class Scaled(Own):
    """A rate of each parameter, in an attribute of it."""

    def one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] * getattr(parameter, "rate", 1.0) * parameter.grad)


@program()
def attributes_that_a_step_reads(parallelize: Parallelize) -> Result:
    """Also where it has another tensor than the module's, and when the script sets them later."""
    model = small_net()

    def between(step: int) -> None:
        if step == 1:
            model.norm.weight.rate = 0.1

    model.norm.weight.rate = 3.0
    return trained(start(parallelize, model, whole(Scaled)), steps=4, between=between)
