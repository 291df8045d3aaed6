"""What is seen of a module between steps."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.shown import Shown, View
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks


class Coming:
    """Numbers that are on their way."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


LOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "norm": lambda net: net.weight.norm(),
    "item": lambda net: net.weight[0, 0].item(),
    "print": lambda net: repr(net.weight),
    "data": lambda net: net.weight.data,
    "state_dict": lambda net: net.state_dict(),
    "forward": lambda net: net(torch.ones(1, 3)),
    "in a list": lambda net: torch.stack([net.weight]),
    "numpy": lambda net: net.weight.detach().numpy(),
    "write": lambda net: nn.init.zeros_(net.weight),
    "copy": copy.deepcopy,
    "save": lambda net: torch.save(net, io.BytesIO()),
    "load": lambda net: net.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}),
    "move": lambda net: net.to(torch.float64),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_waits_once_and_from_then_on_the_tensor_is_as_it_always_was(look: str) -> None:
    net, coming = nn.Linear(3, 2), Coming()
    weight = net.weight
    shown = Shown(net, [(weight, View("weight", problem=None, wait=coming.wait))])
    shown.guard()
    assert (net.weight.shape, net.weight.numel(), isinstance(net.weight, nn.Parameter)) == ((2, 3), 6, True)
    assert coming.num_waits == 0
    LOOKS[look](net)
    assert coming.num_waits == 1
    assert type(weight) is nn.Parameter
    LOOKS["norm"](net)
    assert coming.num_waits == 1
    shown.guard()
    LOOKS["save"](net)
    assert coming.num_waits == 2


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_what_is_not_here_is_refused_until_the_engine_is_at_work(look: str) -> None:
    net = nn.Linear(3, 2)
    shown = Shown(net, [(net.weight, View("weight", problem="half of it is elsewhere", wait=None))])
    shown.guard()
    for _ in range(2):
        with pytest.raises(ShardwiseError, match="weight cannot be read or written on this rank: half of it is elsew"):
            LOOKS[look](net)
    with pytest.raises(ShardwiseError, match="the gradient of weight is not here"):
        _ = net.weight.grad
    assert [tuple(each.shape) for each in net.parameters()] == [(2, 3), (2,)]
    with shown.open(), shown.open():
        LOOKS[look](net)
    with pytest.raises(ShardwiseError):
        LOOKS["norm"](net)


def write_to_halves(zero: int) -> bool:
    """Weights of 16 bits are written to between steps in three ways: their masters follow, and the next step too."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 5).bfloat16()
    net = nn.Sequential(first, nn.Tanh(), last)
    batch = {"input": torch.randn(4, 6).bfloat16(), "y": torch.randn(4, 5).bfloat16()}

    def loss(output: torch.Tensor, given: Any) -> Any:
        return (output - given["y"]).float().square().mean()

    engine = sw.parallelize(
        net, f"dp=2,precision=bf16,zero={zero}", loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        example=batch,
    )  # fmt: skip
    engine.train_step(batch)
    with torch.no_grad():
        first.weight.mul_(2)
    first.bias.data.fill_(3)
    last.weight.data = torch.ones_like(last.weight)
    wanted = {name: each.detach().clone() for name, each in net.named_parameters()}
    engine.train_step(batch)
    found = engine.state_dict()
    engine.close()
    return all(torch.equal(found[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_written_to_weights_that_have_masters_counts(zero: int, two: Ranks) -> None:
    assert two.run(write_to_halves, zero) == [True, True]
