"""A loss that reads a module by itself reads the copy that a trial runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.split.loss_copy import loss_of_copy
from shardwise.stages.split.module_copy import copied


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


MODEL = Model()


def by_a_global(*_: Any) -> Tensor:
    return total_of_global()


def total_of_global() -> Tensor:
    return MODEL.layer.weight.sum()


class Trainer:
    def __init__(self, model: Model) -> None:
        self.held = {"models": [model]}

    def loss(self, *_: Any) -> Tensor:
        return self.total()

    def total(self) -> Tensor:
        return self.held["models"][0].layer.weight.sum()


class Criterion(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *_: Any) -> Tensor:
        return self.model.layer.weight.sum()


def by_a_closure(model: Model) -> Callable[..., Tensor]:
    layer = model.layer

    def total() -> Tensor:
        return layer.weight.sum()

    return lambda *_: total()


def of_a_weight(weight: Tensor, *_: Any) -> Tensor:
    return weight.sum()


def test_a_loss_reads_the_copy_however_it_has_come_by_the_module() -> None:
    twin = copied(MODEL, {})
    nn.init.constant_(next(twin.parameters()), 7.0)
    weight = MODEL.layer.weight
    ways: list[Any] = [by_a_global, Trainer(MODEL).loss, Criterion(MODEL), by_a_closure(MODEL)]
    for loss in [*ways, partial(of_a_weight, weight)]:
        redirected: Any = loss_of_copy(loss, MODEL, twin)
        assert float(redirected(None, {}).detach()) == 28.0
        assert torch.equal(loss(None, {}), weight.sum())


def test_a_loss_that_reads_nothing_is_left_as_it_is() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch["y"])

    twin = copied(MODEL, {})
    losses: list[Any] = [loss, nn.MSELoss(), partial(loss), Trainer(Model()).loss]
    for each in losses:
        assert loss_of_copy(each, MODEL, twin) is each
