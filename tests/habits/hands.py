"""What scripts do by hand to gradients, groups and states of optimizers between steps, and gradients made twice."""
# Programs as users write them.
# mypy: disable-error-code="no-untyped-call,no-any-return,assignment,arg-type,index,union-attr"

import copy
import itertools
from collections import defaultdict
from collections.abc import Mapping
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

#: Optimizers have pieces, or parameters that are not there between steps.
HERE = "is not here|cannot be read or written on this rank"
#: Where gradients are whole, they are those of a step that has been taken.
SPENT = dict.fromkeys(("dp", "cp", "offload.optimizer"), "is written between steps of the engine, which has no effect")
PIECES = {**{f"zero={number}": HERE for number in (1, 2, 3)}, "tp": HERE, "offload.parameters": HERE}
#: Of what scripts read or write between steps a rank has a piece, a part or nothing.
AWAY = dict.fromkeys(("zero=3", "pp", "tp", "offload.parameters"), HERE)
#: What is made of a stage's parameters is a number of one rank.
STAGES = {"pp": "on this rank these are the ones of its stages"}
#: State is kept by pieces.
KEPT = {f"zero={number}": "is asked for, and there is none" for number in (1, 2, 3)}
PENALTY = {"zero=3": "gradients are asked for"}
READ = dict.fromkeys(("zero=3", "pp", "offload.parameters"), "the loss reads .* parameters")


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


def groups_of(engine: Any) -> list[Any]:
    return [group for optimizer in engine.optimizers for group in optimizer.param_groups]


@program({**PIECES, **STAGES})
def clipped_by_groups(parallelize: Parallelize) -> Result:
    """`clip_grad_norm_(chain(*[g["params"] ...]), inf)` behind the step, for its norm."""
    engine = start(parallelize, small_net())

    def between(step: int) -> dict[str, Any]:
        every = itertools.chain(*[group["params"] for group in groups_of(engine)])
        return {f"norm {step}": float(nn.utils.clip_grad_norm_(every, float("inf")))}

    return trained(engine, between=between)


@program({**SPENT, **PIECES, "pp": HERE})
def clipped_behind_the_step(parallelize: Parallelize) -> Result:
    """`clip_grad_norm_(model.parameters())` out of habit: the step has been taken."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)

    return trained(engine, between=between)


@program({**SPENT, **PIECES, "pp": HERE})
def noise_on_gradients(parallelize: Parallelize) -> Result:
    """`p.grad.add_(...)` behind the step."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for each in engine.module.parameters():
            each.grad.add_(0.1)

    return trained(engine, between=between)


@program({"all": "was set between steps|is not here"})
def gradients_put_in_place(parallelize: Parallelize) -> Result:
    """`p.grad = p.grad * 0.5` behind the step; where it cannot be read, from elsewhere."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for each in engine.module.parameters():
            each.grad = torch.ones(each.shape, dtype=each.dtype) if engine.plan.zero else each.grad * 0.5

    return trained(engine, between=between)


@program(only="dp", but="zero=3,offload.parameters,pp,tp")
def gradients_of_ones_own(parallelize: Parallelize) -> Result:
    """A backward of the script's own, another optimizer's step by what was put there, zeros: all are right."""
    engine = start(parallelize, small_net())
    module = engine.module
    other = torch.optim.SGD(module.parameters(), lr=0.01)

    def between(step: int) -> dict[str, float]:
        module.zero_grad()
        cross_entropy(module(batch(5)["x"]), batch(5)).backward()
        norm = sum(float(each.grad.square().sum()) for each in module.parameters())
        if step == 1:
            for each in module.parameters():
                each.grad = torch.zeros_like(each)
        elif step == 2:
            for each in module.parameters():
                each.grad = torch.ones_like(each)
            other.step()
        return {f"norm {step}": norm}

    return trained(engine, steps=4, between=between)


@program()
def gradients_set_to_zero_in_place(parallelize: Parallelize) -> Result:
    """`optimizer.zero_grad(set_to_none=False)`."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for each in engine.optimizers:
            each.zero_grad(set_to_none=False)

    return trained(engine, between=between)


@program({**PIECES, **STAGES})
def a_norm_of_all_in_one_tensor(parallelize: Parallelize) -> Result:
    """`torch.cat` of all that groups have; weights are divided by its norm."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        every = [each for group in groups_of(engine) for each in group["params"]]
        norm = torch.cat([each.data.flatten() for each in every]).norm()
        for each in every:
            each.data.div_(1 + 0.01 * norm)

    return trained(engine, between=between)


@program(PIECES)
def each_weight_shortened_by_groups(parallelize: Parallelize) -> Result:
    """Max-norm by hand: each parameter by its own norm."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for group in groups_of(engine):
            for each in group["params"]:
                each.data.mul_(torch.clamp(1.5 / each.data.norm(), max=1.0))

    return trained(engine, between=between)


@program(PIECES)
def averages_by_groups(parallelize: Parallelize) -> Result:
    """EMA over `param_groups`: copies that follow, and are put in place at the end."""
    engine = start(parallelize, small_net())
    shadow: list[Tensor] = []

    def between(_: int) -> None:
        every = [each for group in groups_of(engine) for each in group["params"]]
        if not shadow:
            shadow.extend(each.detach().clone() for each in every)
        for slow, each in zip(shadow, every, strict=True):
            slow.lerp_(each.detach(), 0.25)
            each.data.copy_(slow)

    return trained(engine, between=between)


@program(dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp"), "(put into|taken out of) a group of SGD"))
def a_parameter_moved_to_another_group(parallelize: Parallelize) -> Result:
    """`add_param_group` of a parameter that is taken out of its group."""
    model = small_net()
    weight = model.head.weight
    engine = start(parallelize, model)

    def between(step: int) -> None:
        if step == 0:
            for optimizer in engine.optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [each for each in group["params"] if each is not weight]
                optimizer.add_param_group({"params": [weight], "lr": 0.5})

    return trained(engine, between=between)


def in_halves(parameters: Any) -> Any:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[:7]}, {"params": every[7:]}], lr=0.1, momentum=0.9)


@program()
def a_group_taken_away(parallelize: Parallelize) -> Result:
    """`del optimizer.param_groups[1]`: the rest of the model is not trained any more."""
    engine = start(parallelize, small_net(), in_halves)

    def between(step: int) -> None:
        if step == 0:
            for optimizer in engine.optimizers:
                del optimizer.param_groups[1]

    return trained(engine, between=between)


@program()
def a_group_emptied(parallelize: Parallelize) -> Result:
    """`param_groups[1]["params"] = []`."""
    engine = start(parallelize, small_net(), in_halves)

    def between(step: int) -> None:
        if step == 0:
            for optimizer in engine.optimizers:
                optimizer.param_groups[1]["params"] = []

    return trained(engine, between=between)


@program()
def a_state_that_is_cleared(parallelize: Parallelize) -> Result:
    """`optimizer.state.clear()`: a warm restart forgets momentum."""
    engine = start(parallelize, small_net(), adam)

    def between(step: int) -> None:
        if step == 1:
            for optimizer in engine.optimizers:
                optimizer.state.clear()

    return trained(engine, steps=4, between=between)


@program()
def a_state_that_is_made_anew(parallelize: Parallelize) -> Result:
    """`optimizer.state = defaultdict(dict)`."""
    engine = start(parallelize, small_net(), adam)

    def between(step: int) -> None:
        if step == 1:
            for optimizer in engine.optimizers:
                optimizer.state = defaultdict(dict)

    return trained(engine, steps=4, between=between)


@program(KEPT)
def a_state_of_one_parameter_forgotten(parallelize: Parallelize) -> Result:
    """ReLoRA: `optimizer.state[p] = {}` for some."""
    model = small_net()
    engine = start(parallelize, model, adam)

    def between(step: int) -> None:
        if step == 1:
            for optimizer in engine.optimizers:
                optimizer.state[model.head.weight] = {}

    return trained(engine, steps=4, between=between)


@program(KEPT)
def a_state_of_one_parameter_popped(parallelize: Parallelize) -> Result:
    """`optimizer.state.pop(p, None)`."""
    model = small_net()
    engine = start(parallelize, model, adam)

    def between(step: int) -> None:
        if step == 1:
            for optimizer in engine.optimizers:
                optimizer.state.pop(model.head.weight, None)

    return trained(engine, steps=4, between=between)


@program(KEPT)
def a_state_of_some_parameters_halved(parallelize: Parallelize) -> Result:
    """`if p in optimizer.state: optimizer.state[p]["exp_avg"].mul_(0.5)`."""
    model = small_net()
    engine = start(parallelize, model, adam)

    def between(_: int) -> None:
        for optimizer in engine.optimizers:
            for each in model.parameters():
                if each in optimizer.state:
                    optimizer.state[each]["exp_avg"].mul_(0.5)

    return trained(engine, steps=4, between=between)


@program()
def momentum_halved(parallelize: Parallelize) -> Result:
    """`for state in optimizer.state.values(): state["exp_avg"].mul_(0.5)`."""
    engine = start(parallelize, small_net(), adam)

    def between(_: int) -> None:
        for optimizer in engine.optimizers:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)

    return trained(engine, steps=4, between=between)


@program()
def an_optimizer_taken_back(parallelize: Parallelize) -> Result:
    """A roll back: `optimizer.load_state_dict(deepcopy(optimizer.state_dict()))`, and the weights."""
    engine = start(parallelize, small_net(), adam)
    kept: dict[str, Any] = {}

    def between(step: int) -> None:
        if step == 0:
            kept["weights"] = {name: each.clone() for name, each in engine.state_dict().items()}
            kept["states"] = [copy.deepcopy(each.state_dict()) for each in engine.optimizers]
        if step == 2:
            engine.load_state_dict(kept["weights"])
            for optimizer, state in zip(engine.optimizers, kept["states"], strict=True):
                optimizer.load_state_dict(state)

    return trained(engine, steps=5, between=between)


@program()
def rates_loaded_with_a_state(parallelize: Parallelize) -> Result:
    """A group of one small parameter, of which most ranks have nothing; its rate was changed before a save."""

    def make(parameters: Any) -> Any:
        *others, last = parameters
        groups = [{"params": [each for each in others if each.dim() > 1] + [last]}]
        return torch.optim.Adam(
            [*groups, {"params": [each for each in others if each.dim() <= 1], "lr": 0.02}], lr=0.01, eps=1e-4
        )

    def bias_alone(parameters: Any) -> Any:
        every = list(parameters)
        small = next(each for each in every if each.dim() == 1)
        groups = [{"params": [each for each in every if each is not small]}, {"params": [small], "lr": 0.02}]
        return torch.optim.Adam(groups, lr=0.01, eps=1e-4)

    found: dict[str, Any] = {}
    for number, factory in enumerate((make, bias_alone)):
        torch.manual_seed(number)
        first = start(parallelize, small_net(), factory)
        found[f"first {number}"] = first.train_step(batch(0))
        for group in groups_of(first):
            group["lr"] *= 0.5
        state = {name: each.clone() for name, each in first.state_dict().items()}
        rates = copy.deepcopy(first.optimizer_state_dict()) if hasattr(first, "optimizer_state_dict") else None
        second = start(parallelize, small_net(), factory) if rates is not None else first
        if rates is not None:
            first.close()
            second.load_state_dict(state)
            second.load_optimizer_state_dict(rates)
        found.update({f"{name} {number}": each for name, each in trained(second).items()})
    return found


@program()
def a_rate_that_is_a_tensor(parallelize: Parallelize) -> Result:
    """`Adam(lr=torch.tensor(...))`, filled with another between steps."""
    rate = torch.tensor(0.01, dtype=torch.float64)

    def make(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=rate, eps=1e-4, foreach=False)

    engine = start(parallelize, small_net(), make)

    def between(step: int) -> None:
        for group in groups_of(engine):
            group["lr"].fill_(0.01 / (step + 2))

    return trained(engine, between=between)


@program()
def a_test_of_rates(parallelize: Parallelize) -> Result:
    """LR finder: rates rise with every batch, then weights and optimizer are put back."""
    engine = start(parallelize, small_net(), adam)
    before = {name: each.clone() for name, each in engine.state_dict().items()}
    found: dict[str, Any] = {}
    for step in range(4):
        for group in groups_of(engine):
            group["lr"] = 1e-3 * 3**step
        found[f"tried {step}"] = engine.train_step(batch(step))
    engine.load_state_dict(before)
    for optimizer in engine.optimizers:
        optimizer.state.clear()
    for group in groups_of(engine):
        group["lr"] = 0.02
    return {**found, **trained(engine)}


@program()
def layers_frozen_in_turn(parallelize: Parallelize) -> Result:
    """Another block is frozen in every step."""
    model = small_net()
    engine = start(parallelize, model, lambda each: torch.optim.AdamW(each, lr=0.01, weight_decay=0.3, eps=1e-4))

    def between(step: int) -> None:
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number != step % 2)

    return trained(engine, steps=4, between=between)


@program()
def sharpness_by_two_steps(parallelize: Parallelize) -> Result:
    """SAM by the engine: gradients at rate 0, weights moved up, a step there, its gradient taken from where it was."""
    engine = start(parallelize, small_net(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    found: dict[str, Any] = {}
    for step in range(2):
        here = {name: each.clone() for name, each in engine.state_dict().items()}
        found[f"loss {step}"] = engine.train_step(batch(step))
        slopes = {name: each.clone() for name, each in engine.gradients().items()}
        norm = sum(float(each.square().sum()) for each in slopes.values()) ** 0.5
        engine.load_state_dict({name: here[name] + 0.05 * each / norm for name, each in slopes.items()})
        found[f"above {step}"] = engine.train_step(batch(step))
        above = {name: each.clone() for name, each in engine.gradients().items()}
        engine.load_state_dict({name: here[name] - 0.1 * each for name, each in above.items()})
    return {**found, **engine.state_dict()}


@program()
def gradients_of_two_tasks_projected(parallelize: Parallelize) -> Result:
    """PCGrad: gradients of two batches at rate 0, and what is against the other one taken off."""
    engine = start(parallelize, small_net(), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    found: dict[str, Any] = {}
    for step in range(2):
        tasks = []
        for task in range(2):
            found[f"loss {step} {task}"] = engine.train_step(batch(2 * step + task))
            tasks.append({name: each.clone() for name, each in engine.gradients().items()})
        inner = sum(float((tasks[0][name] * tasks[1][name]).sum()) for name in tasks[0])
        size = sum(float(each.square().sum()) for each in tasks[1].values())
        state = {name: each.clone() for name, each in engine.state_dict().items()}
        for name, each in tasks[0].items():
            state[name] -= 0.1 * (each + tasks[1][name] - min(0.0, inner) / size * tasks[1][name])
        engine.load_state_dict(state)
    return {**found, **engine.state_dict()}


@program(dict.fromkeys(("dp", "pp", "cp"), "would be called with the gradients of some"))
def decay_in_hooks_of_gradients(parallelize: Parallelize) -> Result:
    """`p.register_hook(lambda g: g + 0.1 * p)`: a decay that parts would each add."""
    model = small_net()
    for each in model.parameters():
        each.register_hook(lambda gradient, weight=each: gradient + 0.1 * weight.detach())
    return trained(start(parallelize, model))


@program(AWAY)
def weights_put_in_anothers_place(parallelize: Parallelize) -> Result:
    """An average swapped in for an evaluation: `p.data, s.data = s.data, p.data`, and back again."""
    model = small_net()
    slow = copy.deepcopy(model)
    engine = start(parallelize, model)
    found: dict[str, Any] = {}

    def swap() -> None:
        for one, other in zip(engine.module.parameters(), slow.parameters(), strict=True):
            one.data, other.data = other.data, one.data

    for step in range(3):
        found[f"loss {step}"] = engine.train_step(batch(step))
        for one, other in zip(engine.module.parameters(), slow.parameters(), strict=True):
            other.data.lerp_(one.data, 0.3)
        swap()
        found[f"held out {step}"] = engine.evaluate(batch(9))
        swap()
    return {**found, **engine.state_dict()}


@program(AWAY)
def an_average_with_a_backup(parallelize: Parallelize) -> Result:
    """EMA as it is copied around: `backup = p.data; p.data = shadow`, evaluated, then `p.data = backup`."""
    engine = start(parallelize, small_net())
    shadow: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    for step in range(3):
        found[f"loss {step}"] = engine.train_step(batch(step))
        backup: dict[str, Tensor] = {}
        for name, each in engine.module.named_parameters():
            old = shadow.get(name, each.data.clone())
            shadow[name] = 0.9 * old + 0.1 * each.data
            backup[name] = each.data
            each.data = shadow[name]
        found[f"held out {step}"] = engine.evaluate(batch(9))
        for name, each in engine.module.named_parameters():
            each.data = backup[name]
    return {**found, **engine.state_dict()}


@program(AWAY)
def averaged_by_torch_and_its_rate(parallelize: Parallelize) -> Result:
    """SWA: `AveragedModel`, `SWALR`, and the average evaluated by a second module."""
    model = small_net()
    engine = start(parallelize, model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    schedulers = [torch.optim.swa_utils.SWALR(each, swa_lr=0.02, anneal_epochs=2) for each in engine.optimizers]

    def between(step: int) -> dict[str, Any]:
        averaged.update_parameters(engine.module)
        for each in schedulers:
            each.step()
        return {f"averaged {step}": float(averaged(batch(9)["x"]).detach().square().mean())}

    return trained(engine, between=between)


class Lora(Block):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(2, 8) * 0.1), nn.Parameter(torch.zeros(16, 2))
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(torch.tanh(self.up(hidden) + hidden @ self.into.T @ self.out.T))


@program({name: HERE for name in AWAY if name != "tp"})
def adapters_merged_now_and_then(parallelize: Parallelize) -> Result:
    """ReLoRA: `up.weight += out @ into`, then `out` is nothing again."""
    model = small_net(block=Lora)

    def make(parameters: Any) -> Any:
        return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)

    engine = start(parallelize, model, make)

    def between(step: int) -> None:
        if step == 1:
            for layer in engine.module.layers:
                layer.up.weight.data += layer.out.data @ layer.into.data
                layer.out.data.zero_()

    return trained(engine, steps=4, between=between)


@program({"all": "is another parameter than the engine was made with"})
def tied_when_the_engine_is_there(parallelize: Parallelize) -> Result:
    """`model.head.weight = model.embed.weight` behind `parallelize`."""
    model = small_net()
    engine = start(parallelize, model)
    engine.module.head.weight = engine.module.embed.weight
    return trained(engine)


@program({"all": "that are no parameters of the module"})
def tied_when_the_optimizer_is_there(parallelize: Parallelize) -> Result:
    """The optimizer was made before weights were tied, and has the one that nobody uses."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight = model.embed.weight
    return trained(start(parallelize, model, lambda _: optimizer))


@program({"all": "the state lacks"})
def a_part_of_a_state_loaded(parallelize: Parallelize) -> Result:
    """`engine.load_state_dict({"head.weight": ...})`."""
    engine = start(parallelize, small_net())

    def between(step: int) -> None:
        if step == 0:
            engine.load_state_dict({"head.weight": torch.ones(12, 8, dtype=torch.float64)})

    return trained(engine, between=between)


class Flows(Net):
    """Rows of numbers; the loss asks for gradients by them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def numbers(seed: int, *, asks: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    return {"x": x.requires_grad_() if asks else x, "labels": batch(seed)["labels"]}


@program(PENALTY, but="pp,cp")
def a_penalty_on_gradients_of_the_batch(parallelize: Parallelize) -> Result:
    """R1: `batch["x"].requires_grad_()`, and the loss asks for the gradient by it."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        if not output.requires_grad:
            return cross_entropy(output, given)
        (slope,) = torch.autograd.grad(output.square().sum(), given["x"], create_graph=True)
        return cross_entropy(output, given) + 0.1 * slope.square().sum((1, 2)).mean()

    engine = parallelize(Flows().double(), loss=loss, optimizer=sgd, example=numbers(0, asks=True))
    found = {f"loss {step}": engine.train_step(numbers(step, asks=True)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@program(AWAY, but="cp")
def a_maker_and_its_critic(parallelize: Parallelize) -> Result:
    """A GAN of two engines: the maker's loss calls the critic, which another engine trains."""
    torch.manual_seed(1)
    maker, critic = Maker().double(), Critic().double()

    def fools(output: Tensor, _: Any) -> Tensor:
        return functional.softplus(-critic(output)).mean()

    def tells(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, given["real"][:, None].expand_as(output))

    def judged(seed: int, made: Tensor) -> dict[str, Tensor]:
        real = numbers(seed)["x"]
        both = torch.stack([real, made], 1).flatten(0, 1)
        return {"x": both, "real": torch.tensor([1.0, 0.0] * 4, dtype=torch.float64)}

    def drawn(seed: int) -> dict[str, Tensor]:
        return {"x": numbers(seed + 50)["x"]}

    first = parallelize(critic, loss=tells, optimizer=sgd, example=judged(0, numbers(50)["x"]))
    second = parallelize(maker, loss=fools, optimizer=sgd, example=drawn(0))
    found: dict[str, Any] = {}
    for step in range(3):
        made = second.predict(drawn(step))
        found[f"critic {step}"] = first.train_step(judged(step, made))
        found[f"maker {step}"] = second.train_step(drawn(step))
    return {**found, **{f"c.{n}": v for n, v in first.state_dict().items()}, **second.state_dict()}


@program(READ, but="cp")
def a_penalty_between_real_and_made(parallelize: Parallelize) -> Result:
    """WGAN-GP: the loss calls the critic on rows between, and asks for the gradient by them."""
    critic = Critic().double()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        between = (0.3 * given["x"] + 0.7 * given["made"]).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return output.mean() - critic(given["made"]).mean() + (slope.norm(dim=-1) - 1).square().mean()

    def make(seed: int) -> dict[str, Tensor]:
        return {"x": numbers(seed)["x"], "made": numbers(seed + 50)["x"]}

    engine = parallelize(critic, loss=loss, optimizer=sgd, example=make(0))
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    return {**found, **engine.state_dict()}
