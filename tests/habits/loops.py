"""What scripts change while they train, and losses and optimizers that remember or look around."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

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

PIECES = "whether .* can update a piece|would see"
IN_PIECES = dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp"), PIECES)
GONE = "cannot be read or written on this rank|cannot be drawn anew"
PARTS = "a part of a sequence gives other numbers"


class Warm(Net):
    """Scores by a temperature that scripts change."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


@program()
def a_temperature_that_falls(parallelize: Parallelize) -> Result:
    """An attribute of the module, changed between steps by the script."""
    model = Warm().double()

    def between(step: int) -> None:
        model.temperature = 1.0 / (step + 2)

    return trained(start(parallelize, model), between=between)


class Gate(Block):
    open = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.open * (super().forward(x) - x)


@program()
def a_layer_that_is_switched_off(parallelize: Parallelize) -> Result:
    """Progressive training: an attribute of one layer says whether it counts."""
    model = small_net(block=Gate)

    def between(step: int) -> None:
        cast(Gate, model.layers[1]).open = 0.0 if step == 0 else 0.5

    return trained(start(parallelize, model), between=between)


@program()
def another_number_in_each_batch(parallelize: Parallelize) -> Result:
    """A number of the batch that is no tensor, another in every step."""

    class Noted(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    def with_scale(seed: int) -> dict[str, Any]:
        return {**batch(seed), "scale": 1.0 + seed}

    engine = parallelize(Noted().double(), loss=cross_entropy, optimizer=sgd, example=with_scale(0), entries={"x": 1})
    found = {f"loss {step}": engine.train_step(with_scale(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Remembering:
    """A loss divided by the mean of those before it, as curricula and multi-task weights are."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        loss = cross_entropy(output, given)
        now = float(loss.detach())
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return loss / self.mean


@program({"dp": "the loss remembers mean", "microbatches": "the loss remembers mean", "cp": PARTS})
def a_loss_that_remembers(parallelize: Parallelize) -> Result:
    """What it remembers of its rows would be another thing on each replica."""
    engine = parallelize(small_net(), loss=Remembering(), optimizer=sgd, example=batch(0))
    return trained(engine)


@program({"cp": PARTS})
def a_loss_whose_weight_rises(parallelize: Parallelize) -> Result:
    """A variable of the script that the loss reads."""
    weight = [0.1]

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) + weight[0] * output.square().mean()

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))

    def between(step: int) -> None:
        weight[0] = 0.5 * (step + 1)

    return trained(engine, between=between)


@program({"zero=3": GONE, "pp": GONE, "tp": GONE, "offload.parameters=1.0": GONE})
def a_head_made_anew(parallelize: Parallelize) -> Result:
    """The head is drawn again between steps, from a seed."""
    model = small_net()
    engine = start(parallelize, model)

    def between(step: int) -> None:
        if step == 0:
            torch.manual_seed(7)
            engine.module.head.reset_parameters()

    return trained(engine, between=between)


class LayerByLayer(Optimizer):
    """A step of each layer by what `changed` makes of its gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * self.changed(each, each.grad))

    def changed(self, weight: Tensor, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class Lamb(LayerByLayer):
    """A step as long as the layer's weights are."""

    def changed(self, weight: Tensor, gradient: Tensor) -> Tensor:
        trust: Tensor = weight.norm() / gradient.norm().clamp(min=1e-12)
        return gradient * trust


@program(IN_PIECES)
def a_step_as_long_as_the_layer(parallelize: Parallelize) -> Result:
    """LARS and LAMB: norms of whole layers decide."""
    return trained(start(parallelize, small_net(), Lamb))


class Centred(LayerByLayer):
    """Gradients without their mean over inputs, as gradient centralisation has them."""

    def changed(self, weight: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG002
        return gradient - gradient.mean(-1, keepdim=True) if gradient.dim() > 1 else gradient


@program(IN_PIECES)
def gradients_without_their_mean(parallelize: Parallelize) -> Result:
    """Gradient centralisation."""
    return trained(start(parallelize, small_net(), Centred))


@program(
    {
        "zero=1": PIECES,
        "zero=2": PIECES,
        "zero=3": PIECES,
        "tp": PIECES,
        "pp": PIECES,
        "offload.optimizer=1.0": PIECES,
        "offload.parameters=1.0": PIECES,
    }
)
def noise_that_shrinks_weights(parallelize: Parallelize) -> Result:
    """A hook of the optimizer's steps that shrinks every weight: right on pieces as on wholes."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = SGD(parameters, lr=0.1)

        def shrink(optimizer: Optimizer, *_: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for each in group["params"]:
                        each.mul_(0.99)

        made.register_step_post_hook(shrink)
        return made

    return trained(start(parallelize, small_net(), make))


@program()
def maximised(parallelize: Parallelize) -> Result:
    """`maximize=True`, with Nesterov's momentum and decay."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1, maximize=True)

    return trained(start(parallelize, small_net(), make))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return -0.5 * gradient


class Adversarial(Block):
    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = Reversed.apply(super().forward(x) - x)  # type: ignore[no-untyped-call]
        return x + turned


@program()
def gradients_reversed(parallelize: Parallelize) -> Result:
    """A function of one's own in autograd: domain adaptation."""
    return trained(start(parallelize, small_net(block=Adversarial)))


class Rounded(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden + (hidden.mul(4).round() / 4 - hidden).detach()


@program()
def straight_through(parallelize: Parallelize) -> Result:
    """Quantisation whose gradient goes straight through."""
    return trained(start(parallelize, small_net(block=Rounded)))


class Deep(Net):
    """One block several times: universal transformers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for _ in range(3):
            for layer in self.layers:
                hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@program()
def layers_used_again(parallelize: Parallelize) -> Result:
    """Blocks that are called three times in a forward."""
    return trained(start(parallelize, Deep().double()))


@program()
def lengths_that_change(parallelize: Parallelize) -> Result:
    """Another number of tokens in every step."""
    engine = start(parallelize, small_net())
    found = {}
    for step in range(3):
        given = batch(step)
        found[f"loss {step}"] = engine.train_step(
            {key: each[:, : 3 - step % 2 * 1].contiguous() for key, each in given.items()}
        )
    return {**found, **engine.state_dict()}


class Spectral(Block):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        nn.utils.parametrizations.spectral_norm(self.up)


@program()
def spectral_norms(parallelize: Parallelize) -> Result:
    """Weights divided by their largest singular value, which every forward follows by a step of power iteration."""
    return trained(start(parallelize, small_net(block=Spectral)))


class Counting(Block):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1.0 + 0.1 * self.calls)


@program()
def calls_counted_in_an_attribute(parallelize: Parallelize) -> Result:
    """A warm-up by the number of forwards so far: trials and microbatches count as well, unless they are undone."""
    return trained(start(parallelize, small_net(block=Counting)))


@program({"zero=3": "in a forward", "offload.parameters=1.0": "in a forward"}, but="cp")
def a_penalty_on_gradients_of_inputs(parallelize: Parallelize) -> Result:
    """A gradient in the forward, and its gradient in the backward."""

    class Smooth(Net):
        def forward(self, x: Tensor) -> Any:
            hidden = self.embed(x)
            for layer in self.layers:
                hidden = layer(hidden)
            scores = self.head(self.norm(hidden))
            if not torch.is_grad_enabled():
                return scores, scores.new_zeros(x.shape[0])
            (slope,) = torch.autograd.grad(scores.square().sum(), hidden, create_graph=True)
            return scores, slope.square().sum((1, 2))

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        penalty: Tensor = 0.1 * output[1].mean()
        return cross_entropy(output[0], given) + penalty

    return trained(parallelize(Smooth().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def loss_of_an_early_layer_too(parallelize: Parallelize) -> Result:
    """Deep supervision: hidden states of every layer are returned, and each has a loss."""

    class Supervised(Net):
        def forward(self, x: Tensor) -> Any:
            hidden, found = self.embed(x), []
            for layer in self.layers:
                hidden = layer(hidden)
                found.append(self.head(self.norm(hidden)))
            return found

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output[0], given) * 0.3 + cross_entropy(output[1], given)

    return trained(parallelize(Supervised().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"all": "no optimizer has them"})
def a_group_added_later(parallelize: Parallelize) -> Result:
    """`add_param_group` of a layer that was frozen, on the optimizer that the factory made."""
    model = small_net()
    model.head.weight.requires_grad_(False)
    made: list[Optimizer] = []

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made.append(SGD([each for each in parameters if each.requires_grad], lr=0.1))
        return made[-1]

    engine = start(parallelize, model, make)

    def between(step: int) -> None:
        if step == 0:
            engine.module.head.weight.requires_grad_(True)
            (engine.optimizers if hasattr(engine, "optimizers") else made)[0].add_param_group(
                {"params": [engine.module.head.weight], "lr": 0.5}
            )

    return trained(engine, between=between)


@program({"zero=3": GONE, "pp": GONE, "tp": GONE, "offload.parameters=1.0": GONE, "cp": PARTS})
def a_teacher_beside_the_student(parallelize: Parallelize) -> Result:
    """A frozen copy inside the module gives targets; the script moves it after the student."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Net(), Net()
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x), target

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        apart: Tensor = (output[0] - output[1]).square().mean()
        return cross_entropy(output[0], given) + apart

    torch.manual_seed(0)
    engine = parallelize(Pair().double(), loss=loss, optimizer=sgd, example=batch(0))

    def between(_: int) -> None:
        with torch.no_grad():
            pairs = zip(engine.module.teacher.parameters(), engine.module.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.mul_(0.5).add_(fast, alpha=0.5)

    return trained(engine, between=between)
