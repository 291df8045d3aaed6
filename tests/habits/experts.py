"""Experts of one's own under ep: groups of them, hooks around them, ties, and what is no sum."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from tests.habits.drawn.attentions import WIDTH
from tests.habits.drawn.operations import Mixture
from tests.habits.harness import Batch, Parallelize, Result, batch, program, sgd, start, trained


class Net(nn.Module):
    """Two layers of experts between an embedding and a head."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList([Mixture(form=form, top=2), Mixture(form=form, top=1)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def net(form: str = "plain") -> Net:
    return Net(form).double()


@program(only="ep")
def experts_as_they_are(parallelize: Parallelize) -> Result:
    """Tokens travel to their experts."""
    return trained(start(parallelize, net()))


@program(only="ep")
def weights_inside_of_experts(parallelize: Parallelize) -> Result:
    """A token's weight is multiplied before the last matrix."""
    return trained(start(parallelize, net("weights inside")))


@program({"ep": "is not the sum of what each expert chosen makes"}, only="ep")
def experts_that_are_no_sum(parallelize: Parallelize) -> Result:
    """A function of the weighted sum."""
    return trained(start(parallelize, net("not a sum")))


@program(only="ep")
def slow_routers_and_decayed_experts(parallelize: Parallelize) -> Result:
    """Groups by name and by shape: experts are known by their three dims."""
    model = net()

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        routers = [each for name, each in model.named_parameters() if "router" in name]
        others = [each for each in parameters if all(each is not one for one in routers)]
        groups: list[dict[str, Any]] = [
            {"params": routers, "lr": 1e-3},
            {"params": [each for each in others if each.ndim == 3], "weight_decay": 0.3},
            {"params": [each for each in others if each.ndim < 3], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=1e-2)

    return trained(start(parallelize, model, make))


@program(only="ep")
def frozen_experts_and_a_hook(parallelize: Parallelize) -> Result:
    """The first layer's experts rest, and the second layer's output is scaled by a hook."""
    model = net()
    model.layers[0].get_submodule("experts").requires_grad_(False)
    model.layers[1].register_forward_hook(lambda _, __, out: out * 1.5)
    return trained(start(parallelize, model))


@program(only="ep")
def routers_that_are_tied(parallelize: Parallelize) -> Result:
    """One router for both layers, whose gradient has a hook that is linear."""
    model = net()
    first, second = (each.get_submodule("router") for each in model.layers)
    second.weight = first.weight
    assert isinstance(first.weight, nn.Parameter)
    first.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return trained(start(parallelize, model))


class Noted(nn.Module):
    """A layer of experts that notes something in a buffer when it is trained."""

    noted: Tensor

    def __init__(self, inner: nn.Module, note: Any) -> None:
        super().__init__()
        self.inner, self.note = inner, note
        self.register_buffer("noted", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.noted.copy_(self.note(self.noted, x.detach()))
        return self.inner(x)


def noting(note: Any) -> Net:
    model = net()
    model.layers[0] = Noted(model.layers[0], note)
    return model.double()


@program(only="ep")
def a_count_beside_experts(parallelize: Parallelize) -> Result:
    """A buffer that counts forwards."""
    return trained(start(parallelize, noting(lambda count, _: count + 1)))


@program({"ep": "2 replicas have 2 different ones"}, only="ep")
def a_mean_beside_experts(parallelize: Parallelize) -> Result:
    """A buffer that follows what the layer is given."""
    return trained(start(parallelize, noting(lambda mean, x: 0.9 * mean + 0.1 * x.mean())))


@program({"ep": "counts the rows that it is given in the buffer layers.0.noted"}, only="ep")
def rows_counted_beside_experts(parallelize: Parallelize) -> Result:
    """A buffer that counts rows."""
    return trained(start(parallelize, noting(lambda count, x: count + len(x))))


def uneven(seed: int) -> Batch:
    made = batch(seed)
    labels = made["labels"].clone()
    labels[2:, :2] = -100
    return {"x": made["x"], "labels": labels}


@program(only="ep", whole=True)
def labels_that_are_ignored_beside_experts(parallelize: Parallelize) -> Result:
    """One replica has three times as many labels as the other."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten())

    engine = parallelize(net(), loss=loss, optimizer=sgd, example=batch(0))
    found = {f"loss {step}": engine.train_step(uneven(step)) for step in range(3)}
    return {**found, "held out": engine.evaluate(uneven(9)), **engine.state_dict()}


@program(only="ep", whole=True)
def a_sum_beside_experts(parallelize: Parallelize) -> Result:
    """A loss that is added up and not divided."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="sum") / 16

    return trained(parallelize(net(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"ep": "clip"}, only="ep")
def clip_of_minus_one_beside_experts(parallelize: Parallelize) -> Result:
    """Gradient ascent."""
    return trained(start(parallelize, net(), clip=-1.0))


@program(only="ep")
def gradients_clipped_beside_experts(parallelize: Parallelize) -> Result:
    """The norm is that of all experts, wherever they are."""
    engine = start(parallelize, net(), clip=0.05)
    return trained(engine, between=lambda step: {f"norm {step}": engine.gradient_norm})


@program(only="ep")
def a_layer_in_evaluation_mode_beside_experts(parallelize: Parallelize) -> Result:
    """Dropout that is off in one layer alone."""
    model = net()
    model.layers.append(nn.Dropout(0.5))
    model.layers[2].eval()
    return trained(start(parallelize, model))
