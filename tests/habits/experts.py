"""Experts of one's own under ep: groups of them, hooks around them, ties, and what is no sum."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.habits.drawn.attentions import WIDTH
from tests.habits.drawn.operations import Mixture
from tests.habits.harness import Parallelize, Result, program, start, trained


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
