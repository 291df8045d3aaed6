"""Outputs, metrics, schedulers and what else stands around a step in the scripts of users."""

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from tests.habits.harness import (
    Block,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    in_two_groups,
    program,
    sgd,
    small_net,
    start,
    trained,
)


def accuracy(output: Tensor, given: Mapping[str, Tensor]) -> dict[str, Any]:
    hits = output.argmax(-1) == given["labels"]
    return {"accuracy": (hits.sum(), hits.numel()), "top": output.amax(-1).double().mean()}


@program()
def outputs_of_a_batch(parallelize: Parallelize) -> Result:
    """Logits for whatever comes: after each step, of a batch without labels."""
    engine = start(parallelize, small_net())
    return trained(engine, between=lambda step: {f"scores {step}": engine.predict({"x": batch(9)["x"]})})


@program()
def outputs_of_the_last_smaller_batch(parallelize: Parallelize) -> Result:
    """A loader without `drop_last` ends with three rows, and then with one."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    return {f"{rows} rows": engine.predict(batch(5, rows=rows)) for rows in (3, 1, 5)}


@program()
def a_whole_evaluation_set(parallelize: Parallelize) -> Result:
    """HF Trainer's `compute_metrics`: all predictions and labels first, then any metric of them."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    batches = [batch(seed, rows) for seed, rows in ((5, 4), (6, 4), (7, 2))]
    scores = torch.cat([engine.predict(each) for each in batches]).flatten(0, 1)
    labels = torch.cat([each["labels"] for each in batches]).flatten()
    order = scores.argsort(-1, descending=True)
    rank = (order == labels.unsqueeze(-1)).double().argmax(-1)
    return {"top five": (rank < 5).double().mean(), "rank": (1 / (1 + rank)).mean()}


@program({"cp": "is a mean"})
def accuracy_of_an_evaluation(parallelize: Parallelize) -> Result:
    """Lightning's `validation_step`."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    return {"loss": engine.evaluate(batch(5), metrics=accuracy), **engine.metrics}


@program({"cp": "is a mean"})
def accuracy_of_every_step(parallelize: Parallelize) -> Result:
    """Logged in training."""
    engine, found = start(parallelize, small_net()), dict[str, Any]()
    for step in range(3):
        found[f"loss {step}"] = engine.train_step(batch(step), metrics=accuracy)
        found |= {f"{name} {step}": each for name, each in engine.metrics.items()}
    found.update(engine.state_dict())
    return found


@program({"cp": "the loss is a mean|the metric entropy is a mean"})
def metrics_of_the_loss_itself(parallelize: Parallelize) -> Result:
    """`return loss, {"perplexity": ...}`, as training steps of many libraries do."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Any:
        made = cross_entropy(output, given)
        return made, {"entropy": made.detach(), **accuracy(output, given)}

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))
    found = dict[str, Any]()

    def between(step: int) -> None:
        found.update({f"{name} {step}": each for name, each in engine.metrics.items()})

    return {**trained(engine, between=between), **found}


@program()
def metrics_by_kinds_of_rows(parallelize: Parallelize) -> Result:
    """A mean over those that count, of which microbatches have different numbers, or none."""

    def rare(output: Tensor, given: Mapping[str, Tensor]) -> dict[str, Any]:
        counts = given["labels"] < 3
        return {"rare": ((output.argmax(-1) == given["labels"])[counts].sum(), counts.sum())}

    engine = start(parallelize, small_net())
    engine.evaluate(batch(5), metrics=rare)
    return dict(engine.metrics)


@program()
def evaluated_between_steps(parallelize: Parallelize) -> Result:
    """Training goes on as if nobody had looked."""
    engine = start(parallelize, small_net())

    def between(step: int) -> dict[str, Any]:
        return {f"held out {step}": engine.evaluate(batch(9)), f"scores {step}": engine.predict(batch(8))}

    return trained(engine, between=between)


class Two(nn.Module):
    """Two heads, returned as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.value = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.net(x)
        return {"scores": scores, "values": self.value(scores.tanh()).squeeze(-1), "both": (scores.argmax(-1), None)}


@program({"cp": "a part of a sequence"})
def outputs_in_a_dictionary(parallelize: Parallelize) -> Result:
    """Nested, with None among them."""

    def loss(output: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output["scores"], given) + output["values"].square().mean()

    engine = parallelize(Two().double(), loss=loss, optimizer=sgd, example=batch(0))
    engine.train_step(batch(0))
    found = engine.predict(batch(3))
    assert found["both"][1] is None
    return {"scores": found["scores"], "values": found["values"], "ids": found["both"][0]}


def scheduled(
    parallelize: Parallelize, make: Callable[[Optimizer], Any], optimizer: Any = sgd, *, takes_loss: bool = False
) -> Result:
    """Five steps with a scheduler for each optimizer, and the rates that it set."""
    engine = start(parallelize, small_net(), optimizer)
    schedulers = [make(each) for each in engine.optimizers]
    found = dict[str, Any]()
    for step in range(5):
        loss = engine.train_step(batch(step))
        for each in schedulers:
            each.step(loss) if takes_loss else each.step()
        found[f"loss {step}"] = loss
        found[f"rate {step}"] = engine.optimizers[0].param_groups[0]["lr"]
    found.update(engine.state_dict())
    return found


@program()
def a_rate_that_steps_down(parallelize: Parallelize) -> Result:
    """`StepLR`."""
    return scheduled(parallelize, lambda each: lr_scheduler.StepLR(each, 2, 0.5))


@program()
def a_rate_by_milestones(parallelize: Parallelize) -> Result:
    """`MultiStepLR`."""
    return scheduled(parallelize, lambda each: lr_scheduler.MultiStepLR(each, [1, 3]))


@program()
def a_rate_that_is_constant_first(parallelize: Parallelize) -> Result:
    """`ConstantLR`, then `LinearLR`, one after the other by `SequentialLR`."""

    def make(each: Optimizer) -> Any:
        parts = [lr_scheduler.ConstantLR(each, 0.5, 2), lr_scheduler.LinearLR(each, 0.5, 1.0, 3)]
        return lr_scheduler.SequentialLR(each, parts, [2])

    return scheduled(parallelize, make)


@program()
def a_rate_along_a_cosine(parallelize: Parallelize) -> Result:
    """`CosineAnnealingLR`."""
    return scheduled(parallelize, lambda each: lr_scheduler.CosineAnnealingLR(each, 4))


@program()
def a_rate_with_warm_restarts(parallelize: Parallelize) -> Result:
    """`CosineAnnealingWarmRestarts`."""
    return scheduled(parallelize, lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 2))


@program()
def a_rate_that_decays(parallelize: Parallelize) -> Result:
    """`ExponentialLR` and `PolynomialLR`, multiplied by `ChainedScheduler`."""

    def make(each: Optimizer) -> Any:
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(each, 0.8), lr_scheduler.PolynomialLR(each, 6)]
        )

    return scheduled(parallelize, make)


@program()
def a_rate_by_a_function(parallelize: Parallelize) -> Result:
    """`LambdaLR`, as transformers' warm-up is made."""
    return scheduled(parallelize, lambda each: lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / 3)))


@program()
def a_rate_multiplied_by_a_function(parallelize: Parallelize) -> Result:
    """`MultiplicativeLR`."""
    return scheduled(parallelize, lambda each: lr_scheduler.MultiplicativeLR(each, lambda _: 0.9))


@program()
def one_cycle(parallelize: Parallelize) -> Result:
    """`OneCycleLR` moves momentum too."""
    return scheduled(parallelize, lambda each: lr_scheduler.OneCycleLR(each, max_lr=0.2, total_steps=6))


@program()
def one_cycle_of_adam(parallelize: Parallelize) -> Result:
    """There it is the first of the betas."""
    return scheduled(
        parallelize, lambda each: lr_scheduler.OneCycleLR(each, max_lr=0.01, total_steps=6), lambda p: AdamW(p, lr=1e-3)
    )


@program()
def a_cyclic_rate(parallelize: Parallelize) -> Result:
    """`CyclicLR`."""
    return scheduled(parallelize, lambda each: lr_scheduler.CyclicLR(each, 0.01, 0.1, step_size_up=2))


@program()
def a_rate_that_falls_on_a_plateau(parallelize: Parallelize) -> Result:
    """`ReduceLROnPlateau` is told the loss, which every rank has."""
    return scheduled(
        parallelize, lambda each: lr_scheduler.ReduceLROnPlateau(each, factor=0.3, patience=0), takes_loss=True
    )


@program()
def rates_of_groups_by_a_function_each(parallelize: Parallelize) -> Result:
    """A list of functions, one for each group: groups are there on every rank, in their order."""
    model = small_net()
    engine = start(parallelize, model, in_two_groups(model.head.weight, 0.2, 0.05))
    schedulers = [
        lr_scheduler.LambdaLR(each, [lambda step: 1 / (step + 1), lambda step: step + 1.0])
        for each in engine.optimizers
    ]
    return trained(engine, between=lambda _: _stepped(schedulers))


@program()
def gone_on_with_a_scheduler(parallelize: Parallelize) -> Result:
    """Weights, optimizer and scheduler are saved, and another engine goes on with them."""
    engine = start(parallelize, small_net(), lambda p: AdamW(p, lr=0.01))
    schedulers = [lr_scheduler.CosineAnnealingLR(each, 6) for each in engine.optimizers]
    for step in range(2):
        engine.train_step(batch(step))
        for each in schedulers:
            each.step()
    kept = copy.deepcopy((engine.state_dict(), _optimizer_state(engine), [each.state_dict() for each in schedulers]))
    engine.close()
    engine = start(parallelize, small_net(), lambda p: AdamW(p, lr=0.01))
    schedulers = [lr_scheduler.CosineAnnealingLR(each, 6) for each in engine.optimizers]
    engine.load_state_dict(kept[0])
    _load_optimizer_state(engine, kept[1])
    for each, state in zip(schedulers, kept[2], strict=True):
        each.load_state_dict(state)
    found = trained(engine, between=lambda _: _stepped(schedulers))
    return {**found, "rate": engine.optimizers[0].param_groups[0]["lr"]}


def _stepped(schedulers: Iterable[Any]) -> None:
    for each in schedulers:
        each.step()


def _is_plain(engine: Any) -> bool:
    return type(engine).__name__ == "Plain"


def _optimizer_state(engine: Any) -> Any:
    return [each.state_dict() for each in engine.optimizers] if _is_plain(engine) else engine.optimizer_state_dict()


def _load_optimizer_state(engine: Any, state: Any) -> None:
    if _is_plain(engine):
        for each, own in zip(engine.optimizers, state, strict=True):
            each.load_state_dict(own)
    else:
        engine.load_optimizer_state_dict(state)


@program()
def an_average_of_the_engines_weights(parallelize: Parallelize) -> Result:
    """EMA by `engine.state_dict()`: right under every plan."""
    engine, mean = start(parallelize, small_net()), dict[str, Tensor]()

    def between(_: int) -> None:
        for name, each in engine.state_dict().items():
            mean[name] = each.clone() if name not in mean else mean[name].lerp(each, 0.1)

    return {**trained(engine, between=between), **{f"mean {name}": each for name, each in mean.items()}}


@program()
def evaluated_with_averaged_weights(parallelize: Parallelize) -> Result:
    """The average is loaded, evaluated, and the weights put back."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    first = copy.deepcopy(engine.state_dict())
    engine.train_step(batch(1))
    now = copy.deepcopy(engine.state_dict())
    engine.load_state_dict({name: first[name].lerp(each, 0.5) for name, each in now.items()})
    found = {"averaged": engine.evaluate(batch(9)), "scores": engine.predict(batch(9))}
    engine.load_state_dict(now)
    return {**found, **trained(engine)}


@program()
def accumulated_by_larger_batches(parallelize: Parallelize) -> Result:
    """Gradient accumulation: the batches of four steps, joined, with as many microbatches as the plan has."""
    engine = start(parallelize, small_net())
    parts = [batch(seed) for seed in range(4)]
    joined = {name: torch.cat([each[name] for each in parts]) for name in ("x", "labels")}
    return {"loss": engine.train_step(joined), **engine.state_dict()}


@program()
def gradients_zeroed_by_hand(parallelize: Parallelize) -> Result:
    """`optimizer.zero_grad()` before every step, out of habit."""
    engine = start(parallelize, small_net())

    def between(step: int) -> None:
        for each in engine.optimizers:
            each.zero_grad(set_to_none=step != 1)

    return trained(engine, between=between)


@program()
def frozen_but_for_the_head(parallelize: Parallelize) -> Result:
    """Linear probing; outputs of it."""
    model = small_net()
    for name, each in model.named_parameters():
        each.requires_grad_(name.startswith("head"))
    engine = start(parallelize, model, lambda p: SGD([each for each in p if each.requires_grad], lr=0.1))
    return {**trained(engine), "scores": engine.predict(batch(9))}


@program()
def without_dropout_in_predictions(parallelize: Parallelize) -> Result:
    """Dropout drops in no prediction, and training goes on in training mode."""
    model = small_net(block=lambda: nn.Sequential(Block(), nn.Dropout(0.0)))
    engine = start(parallelize, model)
    found = {"scores": engine.predict(batch(1))}
    assert all(each.training for each in engine.module.modules())
    return {**found, **trained(engine)}


@program()
def seeds_of_the_users_own(parallelize: Parallelize) -> Result:
    """Generators are the user's: neither a step nor a prediction draws from them."""
    torch.manual_seed(7)
    random.seed(7)
    model = small_net()
    engine = start(parallelize, model)
    torch.manual_seed(7)
    engine.train_step(batch(0))
    engine.predict(batch(1))
    return {"drawn": torch.rand(3), "other": random.random(), **trained(engine)}


@program()
def a_scaler_that_is_off(parallelize: Parallelize) -> Result:
    """`GradScaler(enabled=False)` around the loss, as scripts for both kinds of precision have it."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = scaler.scale(cross_entropy(output, given))
        return made

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0))
    return trained(engine, between=lambda _: scaler.update())


@program({"cp": "a part of a sequence"})
def a_loss_scaled_as_a_sum_and_its_number(parallelize: Parallelize) -> Result:
    """Scaled with what it is summed over, the mean and its gradients are what they were."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        number = given["labels"].numel()
        return cross_entropy(output, given) * number * 1024.0, number * 1024

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


def _compiled(module: nn.Module) -> nn.Module:
    made: Any = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


@program({"all": "the module is compiled as a whole by torch.compile"})
def a_compiled_module(parallelize: Parallelize) -> Result:
    """`model = torch.compile(model)`, before anything else."""
    return trained(start(parallelize, _compiled(small_net())))


@program({"all": "the module is compiled as a whole by torch.compile"})
def a_module_compiled_in_place(parallelize: Parallelize) -> Result:
    """`model.compile()`."""
    model = small_net()
    model.compile(backend="eager")
    return trained(start(parallelize, model))


@program()
def compiled_layers_of_a_list(parallelize: Parallelize) -> Result:
    """`layers[i] = torch.compile(layers[i])`: names have `_orig_mod` in them."""
    model = small_net()
    for number, each in enumerate(model.layers):
        model.layers[number] = _compiled(each)
    engine = start(parallelize, model)
    return {**trained(engine), "scores": engine.predict(batch(9))}


@program(always=True)
def compiled_blocks(parallelize: Parallelize) -> Result:
    """`layer.compile()` for each, as torchtitan does it."""
    model = small_net()
    for each in model.layers:
        each.compile(backend="eager")
    engine = start(parallelize, model)
    return {**trained(engine), "scores": engine.predict(batch(9))}


@program()
def stopped_early(parallelize: Parallelize) -> Result:
    """The best by an evaluation is kept, and loaded at the end."""
    engine, best, kept = start(parallelize, small_net(), lambda p: SGD(p, lr=0.5)), float("inf"), dict[str, Any]()
    for step in range(4):
        engine.train_step(batch(step))
        loss = engine.evaluate(batch(9))
        if loss < best:
            best, kept = loss, copy.deepcopy(engine.state_dict())
    engine.load_state_dict(kept)
    return {"best": best, "again": engine.evaluate(batch(9)), **engine.state_dict()}


@program()
def next_words_by_predictions(parallelize: Parallelize) -> Result:
    """Greedy decoding by hand: sequences grow by a word at a time."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    ids = batch(9)["x"]
    for _ in range(3):
        scores = engine.predict({"x": ids})
        ids = torch.cat((ids, scores[:, -1:].argmax(-1)), dim=1)
    return {"ids": ids}
