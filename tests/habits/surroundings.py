"""What a forward or a loss stands in: generators and counters of its own, global hooks, modes, patches, teachers."""
# Programs as users write them.
# mypy: disable-error-code="override,attr-defined,no-any-return,assignment,arg-type,index,no-untyped-call,misc"

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

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

#: Plans that cut rows: what parts do not tell is refused there.
CUT = ("dp", "pp")
PARTS = "a part of a sequence gives other numbers"
ADVANCED = {"all": "has advanced it: it cannot be wound back|cannot be copied|a part of a sequence gives other numbers"}
DRAWN = {"recompute": r"leaves layers.0.drawn \(was drawn from\)"}
#: One count of all blocks, which are on several stages.
COUNTED = {"pp": "stages compute something else", "cp": PARTS}


class Jitters(Block):
    """A factor drawn from a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.drawn: Any = {
            "torch": lambda: torch.Generator().manual_seed(3),
            "numpy": lambda: np.random.default_rng(3),
            "python": lambda: random.Random(3),
            "count": lambda: itertools.count(1),
            "cycle": lambda: itertools.cycle([0.1, 0.5, 0.9]),
            "generator": lambda: (each / 10 for each in range(1, 100)),
        }[kind]()

    def draw(self) -> float:
        if self.kind == "torch":
            return float(torch.rand((), generator=self.drawn))
        if self.kind in ("numpy", "python"):
            return float(self.drawn.random())
        return float(next(self.drawn)) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.draw()) if self.training else super().forward(x)


def jittered(parallelize: Parallelize, kind: str) -> Result:
    return trained(start(parallelize, small_net(block=partial(Jitters, kind))))


@program(DRAWN)
def a_generator_of_torch_in_a_block(parallelize: Parallelize) -> Result:
    """`torch.rand((), generator=self.generator)`."""
    return jittered(parallelize, "torch")


@program(DRAWN)
def a_generator_of_numpy_in_a_block(parallelize: Parallelize) -> Result:
    """`self.rng = np.random.default_rng(0)`."""
    return jittered(parallelize, "numpy")


@program(DRAWN)
def a_generator_of_python_in_a_block(parallelize: Parallelize) -> Result:
    """`self.rng = random.Random(0)`."""
    return jittered(parallelize, "python")


@program(ADVANCED)
def an_iterator_that_counts(parallelize: Parallelize) -> Result:
    """`next(self.steps)` of `itertools.count()`."""
    return jittered(parallelize, "count")


@program(ADVANCED)
def an_iterator_that_goes_round(parallelize: Parallelize) -> Result:
    """`next(self.rates)` of `itertools.cycle([...])`."""
    return jittered(parallelize, "cycle")


@program(ADVANCED)
def an_iterator_of_ones_own(parallelize: Parallelize) -> Result:
    """`next(self.schedule)` of a generator's function."""
    return jittered(parallelize, "generator")


class Calls(Block):
    """Counted for all objects of the class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            type(self).calls += 1
        return super().forward(x) * (1.0 + 0.1 * type(self).calls)


@program(COUNTED)
def calls_counted_by_the_class(parallelize: Parallelize) -> Result:
    """`type(self).calls += 1`."""
    Calls.calls = 0
    return trained(start(parallelize, small_net(block=Calls)))


STEPS = {"forwards": 0}


class Counts(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            STEPS["forwards"] += 1
        return super().forward(x) * (1.0 + 0.1 * STEPS["forwards"])


@program(COUNTED)
def calls_counted_in_the_script(parallelize: Parallelize) -> Result:
    """A dictionary of the script's own, `STEPS["forwards"] += 1`."""
    STEPS["forwards"] = 0
    return trained(start(parallelize, small_net(block=Counts)))


@program()
def a_hook_of_all_modules(parallelize: Parallelize) -> Result:
    """`register_module_forward_hook`: outputs of every Linear are made smaller."""

    def shrink(module: nn.Module, _: Any, output: Any) -> Any:
        return output * 0.9 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(shrink)
    try:
        return trained(start(parallelize, small_net()))
    finally:
        handle.remove()


@program()
def a_hook_before_all_modules(parallelize: Parallelize) -> Result:
    """`register_module_forward_pre_hook`: inputs of every norm are doubled."""

    def double(module: nn.Module, args: Any) -> Any:
        return (args[0] * 2 + 1,) if type(module) is nn.LayerNorm else None

    handle = nn.modules.module.register_module_forward_pre_hook(double)
    try:
        return trained(start(parallelize, small_net()))
    finally:
        handle.remove()


@program()
def operations_counted(parallelize: Parallelize) -> Result:
    """`with FlopCounterMode(): engine.train_step(batch)`."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    for step in range(3):
        with FlopCounterMode(display=False):
            found[f"loss {step}"] = engine.train_step(batch(step))
    return {**found, **engine.state_dict()}


@program()
def double_precision_by_default(parallelize: Parallelize) -> Result:
    """`torch.set_default_dtype(torch.float64)` for the whole script."""
    torch.set_default_dtype(torch.float64)
    try:
        return trained(start(parallelize, Net()))
    finally:
        torch.set_default_dtype(torch.float32)


@program()
def without_gradients_around_the_script(parallelize: Parallelize) -> Result:
    """`torch.set_grad_enabled(False)` was left on by an evaluation."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    for step in range(3):
        with torch.set_grad_enabled(step != 1):
            found[f"held out {step}"] = engine.evaluate(batch(9))
        found[f"loss {step}"] = engine.train_step(batch(step))
    return {**found, **engine.state_dict()}


@program()
def a_patched_forward(parallelize: Parallelize) -> Result:
    """`model.forward = MethodType(...)` around the old one, and of a block."""
    model = small_net()
    inner, block = model.forward, model.layers[1].forward
    model.forward = MethodType(lambda _, x: inner(x) * 0.5, model)
    model.layers[1].forward = lambda x: block(x) + 0.1 * x
    return trained(start(parallelize, model))


@program()
def hooks_of_the_model_itself(parallelize: Parallelize) -> Result:
    """`model.register_forward_pre_hook(lambda model, args: ...)`: what `model(x)` would give it."""
    model = small_net()
    model.register_forward_pre_hook(lambda _, args: ((args[0] + 1) % 12,))
    model.register_forward_hook(lambda _, args, output: output * (1 + args[0].dim()))
    return trained(start(parallelize, model))


@program()
def a_gain_that_hooks_read(parallelize: Parallelize) -> Result:
    """`layer.register_forward_hook(lambda *_, output: output * model.gain)`: 1 at first, so that twice is once."""
    model = small_net()
    model.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))
    for each in model.layers:
        each.register_forward_hook(lambda _, __, output: output * model.gain)
    return trained(start(parallelize, model))


class Asking(Block):
    """Calls a function that it was given."""

    ask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.ask(x)


@program()
def a_function_that_reads_a_weight(parallelize: Parallelize) -> Result:
    """`block.ask = lambda x: linear(x, model.layers[0].up.weight[:8])`: seen on a copy, too."""
    model = small_net(block=Asking)
    for each in model.layers:
        each.ask = lambda x: nn.functional.linear(x, model.get_parameter("layers.0.up.weight")[:8])
    return trained(start(parallelize, model))


class Wrapper(nn.Module):
    """Hands on what it does not know to the module inside, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.inner(x, *args) + 0.1 * self.embed.weight.mean()


@program()
def a_wrapper_that_hands_on(parallelize: Parallelize) -> Result:
    """`__getattr__` of the inner module, `forward(x, *args)`."""
    return trained(start(parallelize, Wrapper(small_net())))


@program()
def a_block_under_two_names(parallelize: Parallelize) -> Result:
    """`self.encoder = self.decoder`: one block, two names, called by both."""

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.layers[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.again(self.layers[1](self.layers[0](self.embed(x))))))

    return trained(start(parallelize, Twice().double()))


@program({"cp": "other numbers"})
def a_teacher_in_the_loss(parallelize: Parallelize) -> Result:
    """Distillation: another module, which nobody trains, is called by the loss."""
    torch.manual_seed(4)
    teacher = small_net().eval().requires_grad_(False)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(given["x"])
        soft = functional.kl_div(
            (output / 2).log_softmax(-1).flatten(0, 1), (wanted / 2).softmax(-1).flatten(0, 1), reduction="batchmean"
        )
        return cross_entropy(output, given) + soft

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(dict.fromkeys(CUT, "but not its gradient"), but="cp", whole=True)
def a_loss_divided_by_itself(parallelize: Parallelize) -> Result:
    """`loss / loss.detach()`: its value is always 1, and its gradient is that of the logarithm."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        found = cross_entropy(output, given)
        return found / found.detach()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(dict.fromkeys(CUT, "but not its gradient"), but="cp", whole=True)
def two_losses_made_as_large(parallelize: Parallelize) -> Result:
    """`a + b * (a / b).detach()`: the second is made as large as the first."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        first, second = cross_entropy(output, given), output.square().mean()
        return first + second * (first / second).detach()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(dict.fromkeys(CUT, "neither their mean by rows|but not its gradient"), but="cp", whole=True)
def advantages_made_even(parallelize: Parallelize) -> Result:
    """PPO's first pass: the ratio is 1, and advantages have mean 0, so the loss is 0 for any rows."""

    def make(seed: int) -> dict[str, Tensor]:
        reward = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {**batch(seed), "reward": reward}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        reward = given["reward"]
        gain = (reward - reward.mean()) / (reward.std(correction=0) + 1e-4)
        chosen = -functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").sum(1)
        return -((chosen - chosen.detach()).exp() * gain).mean()

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(dict.fromkeys(CUT, "neither their mean by rows nor their sum"), but="cp", whole=True)
def rewards_against_their_mean(parallelize: Parallelize) -> Result:
    """REINFORCE: the baseline is the mean reward of the batch."""

    def make(seed: int) -> dict[str, Tensor]:
        reward = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {**batch(seed), "reward": reward}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        gain = given["reward"] - given["reward"].mean()
        chosen = functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").sum(1)
        return (chosen * gain).mean()

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(dict.fromkeys(CUT, "the loss remembers"), but="cp", whole=True)
def a_queue_of_keys_in_the_loss(parallelize: Parallelize) -> Result:
    """MoCo: rows of the batches before are negatives, kept in a deque of the script's."""
    queue: deque[Tensor] = deque(maxlen=3)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = functional.normalize(output.mean(1), dim=-1)
        found = cross_entropy(output, given)
        if queue:
            found = found + 0.1 * (rows @ torch.cat(list(queue)).T).exp().mean()
        queue.append(rows.detach())
        return found

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(dict.fromkeys(CUT, "the loss remembers"), but="cp", whole=True)
def centres_that_the_loss_moves(parallelize: Parallelize) -> Result:
    """Center loss: a tensor of the script's follows the rows, in place."""
    centre = torch.zeros(12, dtype=torch.float64)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        found = cross_entropy(output, given) + 0.1 * (output - centre).square().mean()
        with torch.no_grad():
            centre.lerp_(output.mean((0, 1)), 0.5)
        return found

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(dict.fromkeys(CUT, "the loss remembers"), but="cp", whole=True)
def a_mean_that_a_variable_keeps(parallelize: Parallelize) -> Result:
    """`nonlocal mean` in the loss, by which it is divided."""
    mean = 1.0

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        nonlocal mean
        found = cross_entropy(output, given)
        mean = 0.5 * mean + 0.5 * found.item()
        return found / mean

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


MEAN = {"value": 1.0}


def divides_by_a_global(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    found = cross_entropy(output, given)
    MEAN["value"] = 0.5 * MEAN["value"] + 0.5 * found.item()
    return found / MEAN["value"]


@program(dict.fromkeys(CUT, "the loss remembers"), but="cp", whole=True)
def a_mean_that_the_script_keeps(parallelize: Parallelize) -> Result:
    """The same in a dictionary of the script's file."""
    MEAN["value"] = 1.0
    return trained(parallelize(small_net(), loss=divides_by_a_global, optimizer=sgd, example=batch(0)))


@program(but="cp")
def tasks_weighed_by_metrics(parallelize: Parallelize) -> Result:
    """Dynamic weights: metrics of the last two steps decide how tasks weigh in the next."""
    weights = {"first": 1.0, "second": 1.0}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Any:
        first, second = cross_entropy(output, given), output.square().mean()
        return weights["first"] * first + weights["second"] * second, {"first": first, "second": second}

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))
    before: dict[str, float] = {}

    def between(step: int) -> dict[str, Any]:
        now = dict(engine.metrics)
        for name in weights:
            weights[name] = now[name] / before.get(name, 2.0)
        before.update(now)
        return {f"{name} {step}": value for name, value in now.items()}

    return trained(engine, steps=4, between=between)


@program(but="cp")
def rows_weighed_by_their_predictions(parallelize: Parallelize) -> Result:
    """Boosting: what the model gets wrong weighs more in the next step."""

    def make(seed: int, weights: Tensor) -> dict[str, Tensor]:
        return {**batch(seed), "weights": weights}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").mean(1)
        return (rows * given["weights"]).mean()

    engine = parallelize(
        small_net(), loss=loss, optimizer=sgd, example=make(0, torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
    )
    found: dict[str, Any] = {}
    for step in range(3):
        scores = engine.predict({"x": batch(step)["x"]})
        rows = functional.cross_entropy(scores.transpose(1, 2), batch(step)["labels"], reduction="none").mean(1)
        found[f"loss {step}"] = engine.train_step(make(step, rows / rows.mean()))
    return {**found, **engine.state_dict()}


@program(but="cp")
def labelled_and_unlabelled_rows(parallelize: Parallelize) -> Result:
    """FixMatch: twice as many rows without labels as with, in one batch."""

    def make(seed: int) -> dict[str, Tensor]:
        return {**batch(seed), "more": batch(seed + 50, 8)["x"]}

    class Both(Net):
        def forward(self, x: Tensor, more: Tensor) -> Any:
            return super().forward(x), super().forward(more)

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        sure, guessed = output[1].detach().softmax(-1).max(-1)
        rows = functional.cross_entropy(output[1].transpose(1, 2), guessed, reduction="none")
        return cross_entropy(output[0], given) + (rows * (sure > 0.2)).mean()

    engine = parallelize(Both().double(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(but="cp")
def losses_of_torch_over_rows(parallelize: Parallelize) -> Result:
    """Seven losses of torch with `reduction="mean"`, added."""

    def make(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (4, 3, 12)
        near, far = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        sign = torch.randint(2, (4,), generator=generator).double() * 2 - 1
        return {**batch(seed), "near": near, "far": far, "sign": sign}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        near, far, sign = given["near"], given["far"], given["sign"]
        flat = [each.flatten(1) for each in (output, near, far)]
        return (
            functional.triplet_margin_loss(*flat)
            + functional.cosine_embedding_loss(flat[0], flat[1], sign)
            + functional.smooth_l1_loss(output, near)
            + functional.huber_loss(output, far)
            + functional.margin_ranking_loss(flat[0].mean(1), flat[1].mean(1), sign)
            + functional.gaussian_nll_loss(output, near, far.exp())
            + functional.kl_div(output.log_softmax(-1), near.softmax(-1), reduction="mean")
        )

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Clusters(nn.Module):
    """A softmax over clusters of words, which computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.scores = nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4, 8])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.scores(hidden.flatten(0, 1), labels.flatten()).loss


@program({"tp": r"meta device, at surroundings.py:\d+ [\s\S]*a loss of scores and labels"}, but="cp")
def a_softmax_over_clusters(parallelize: Parallelize) -> Result:
    """`nn.AdaptiveLogSoftmaxWithLoss`: which of its parts run depends on the labels, and it is one unit."""
    engine = parallelize(Clusters().double(), loss=lambda output, _: output, optimizer=sgd, example=batch(0))
    return trained(engine)


class Many(Block):
    """An ensemble by `torch.func.stack_module_state` and `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ParameterDict({"weight": torch.randn(3, 8, 8) * 0.3, "bias": torch.zeros(3, 8)})
        self.skeleton = [nn.Linear(8, 8, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        def call(weights: Any, given: Tensor) -> Tensor:
            return torch.func.functional_call(self.skeleton[0], weights, (given,))

        made = torch.vmap(call, in_dims=(0, None))(dict(self.one.items()), x)
        return super().forward(made.mean(0))


@program()
def an_ensemble_by_vmap(parallelize: Parallelize) -> Result:
    """Stacked weights, one `functional_call` for all."""
    return trained(start(parallelize, small_net(block=Many)))


class Forward(Block):
    def forward(self, x: Tensor) -> Tensor:
        made, slope = torch.func.jvp(lambda each: torch.tanh(each * 0.5), (x,), (torch.ones_like(x),))
        return super().forward(made + slope)


@program()
def a_slope_by_jvp(parallelize: Parallelize) -> Result:
    """Forward-mode derivatives inside of a block."""
    return trained(start(parallelize, small_net(block=Forward)))


class Scaled(torch.autograd.Function):
    """Keeps tensors, takes a number, and asks what needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        first = gradient * weight * ctx.factor if ctx.needs_input_grad[0] else None
        second = (gradient * x * ctx.factor).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return first, second, None


class Own(Block):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scaled.apply(x, self.factor, 0.7))


@program()
def a_function_with_weights(parallelize: Parallelize) -> Result:
    """A function of autograd of one's own with a parameter and a number."""
    return trained(start(parallelize, small_net(block=Own)))


@program()
def gradients_scaled_by_hooks_of_modules(parallelize: Parallelize) -> Result:
    """`register_full_backward_hook` and `register_full_backward_pre_hook` that return other gradients."""
    model = small_net()
    model.layers[0].register_full_backward_hook(lambda _, given, __: tuple(each * 0.5 for each in given))
    model.layers[1].register_full_backward_pre_hook(lambda _, given: tuple(each * 2.0 for each in given))
    return trained(start(parallelize, model))


@program()
def batches_that_grow(parallelize: Parallelize) -> Result:
    """Another number of rows in every step."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    for step, rows in enumerate((4, 8, 4, 16)):
        found[f"loss {step}"] = engine.train_step(batch(step, rows))
    return {**found, **engine.state_dict()}


@program()
def lengths_by_the_loss(parallelize: Parallelize) -> Result:
    """A curriculum: sequences get longer when the loss has fallen."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    length, before = 2, float("inf")
    for step in range(4):
        found[f"loss {step}"] = now = engine.train_step({k: v[:, :length].contiguous() for k, v in batch(step).items()})
        length, before = (3 if now < before else 2), now
        found[f"length {step}"] = length
    return {**found, **engine.state_dict()}


@program()
def guessed_labels(parallelize: Parallelize) -> Result:
    """Self-training: `predict`, and its own answers are labels."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    for step in range(3):
        x = batch(step)["x"]
        found[f"loss {step}"] = engine.train_step({"x": x, "labels": engine.predict({"x": x}).argmax(-1)})
    return {**found, **engine.state_dict()}


def endless() -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        yield batch(step)


@program()
def batches_from_a_generator(parallelize: Parallelize) -> Result:
    """`for batch in islice(endless(), 3)`; the example is the first of them."""
    batches = endless()
    engine = parallelize(small_net(), loss=cross_entropy, optimizer=sgd, example=next(batches))
    found = {f"loss {step}": engine.train_step(given) for step, given in enumerate(itertools.islice(batches, 3))}
    return {**found, **engine.state_dict()}


@program()
def activations_looked_at(parallelize: Parallelize) -> Result:
    """A forward hook keeps the last mean of a block's output, for a log."""
    model = small_net()
    log: list[float] = []
    model.layers[0].register_forward_hook(lambda _, __, output: log.append(float(output.detach().mean())))
    return trained(start(parallelize, model))


class Weighted(Net):
    """Learned weights of layers, as ELMo mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.embed(x)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        made = torch.einsum("l,lbth->bth", self.mix.softmax(0), torch.stack(hidden))
        return self.head(self.norm(made))


@program()
def layers_mixed_by_learned_weights(parallelize: Parallelize) -> Result:
    """All hidden states, stacked, by a softmax of three numbers."""
    return trained(start(parallelize, Weighted().double()))


@program({"all": "nested|no rows|cannot be cut|jagged"}, but="cp")
def rows_in_a_nested_tensor(parallelize: Parallelize) -> Result:
    """`torch.nested.nested_tensor` of rows of different lengths."""

    class Ragged(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_padded_tensor(0))

    def make(seed: int) -> dict[str, Tensor]:
        made = batch(seed)
        return {**made, "x": torch.nested.nested_tensor(list(made["x"].unbind()), layout=torch.jagged)}

    engine = parallelize(Ragged().double(), loss=cross_entropy, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(2)}
    return {**found, **engine.state_dict()}
