"""Random lives of a streamed module beside a plain one: whatever is done to both, they stay the same, bit for bit."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardwise.dataflow.machine import Machine
from shardwise.states.tiers import StreamedWeights, stream
from tests.states.streaming.test_weights import Net, Recomputed

Both = tuple[Net, Net]


def loss_of(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net(x).square().mean()
    return out


class Life:
    """A plain module and a streamed one, and what may be done to them."""

    def __init__(self, seed: int, machine: Machine) -> None:
        self.die = random.Random(seed)
        torch.manual_seed(seed)
        makes: list[Callable[[], Net]] = [Net, lambda: Recomputed(use_reentrant=self.die.random() < 0.5)]
        plain = self.die.choice(makes)()
        net = copy.deepcopy(plain)
        room = self.die.choice([None, 25_000, 30_000])
        found = stream(net, machine, "cpu:0", blocks=list(net.blocks), room_bytes=room)
        assert found is not None
        self.weights: StreamedWeights = found
        self.both: Both = (plain, net)
        self.optimizers: list[Optimizer] = [SGD(each.parameters(), lr=1e-4, momentum=0.9) for each in self.both]
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def x(self) -> Tensor:
        return torch.randn(self.die.randint(1, 5), 4)

    def evaluate(self) -> None:
        x = self.x()
        with self.die.choice([torch.no_grad, torch.inference_mode])():
            plain, streamed = (each(x) for each in self.both)
        assert torch.equal(plain, streamed)

    def forward(self) -> None:
        x = self.x()
        plain, streamed = (loss_of(each, x) for each in self.both)
        assert torch.equal(plain, streamed)
        self.waiting.append((plain, streamed))

    def backward(self) -> None:
        if self.waiting:
            losses = self.waiting.pop(self.die.randrange(len(self.waiting)))
            twice = self.die.random() < 0.2
            for loss in losses:
                loss.backward(retain_graph=twice)  # type: ignore[no-untyped-call]
                if twice:
                    loss.backward()  # type: ignore[no-untyped-call]

    def all_backwards(self) -> None:
        for losses in zip(*self.waiting, strict=True):
            sum(losses, torch.zeros(())).backward()
        self.waiting.clear()

    def step(self) -> None:
        self.waiting.clear()  # What was computed with the old weights has no backward any more.
        for optimizer in self.optimizers:
            optimizer.step()
        to_none = self.die.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def load(self) -> None:
        self.waiting.clear()
        state = {name: each + 0.01 for name, each in self.both[0].state_dict().items()}
        for each in self.both:
            each.load_state_dict(state)

    def replace(self) -> None:
        self.waiting.clear()
        for each in self.both:
            for parameter in each.parameters():
                parameter.data = parameter.data * 0.99

    def freeze(self) -> None:
        self.waiting.clear()
        chosen = self.die.random()
        for each in self.both:
            for number, parameter in enumerate(each.parameters()):
                parameter.requires_grad_((number * 0.37 + chosen) % 1 < 0.8)

    def forget(self) -> None:
        self.waiting.clear()

    def check(self) -> None:
        for (name, one), (_, other) in zip(*(each.named_parameters() for each in self.both), strict=True):
            assert torch.equal(one, other), name
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", [*range(5), 36])
def test_a_streamed_module_lives_as_a_plain_one_does(seed: int) -> None:
    with Machine(["cpu:0"]) as machine:
        life = Life(seed, machine)
        deeds = [
            *[life.evaluate] * 2,
            *[life.forward] * 4,
            *[life.backward] * 3,
            *[life.step] * 2,
            *(life.all_backwards, life.load, life.replace, life.freeze, life.forget),
        ]
        for _ in range(40):
            life.die.choice(deeds)()
            life.check()
        life.weights.close()
        life.evaluate()


def test_a_module_of_files_lives_on_after_it_was_closed(tmp_path: Path) -> None:
    plain = Net()
    net: nn.Module = copy.deepcopy(plain)
    with Machine(["cpu:0"]) as machine:
        blocks = list(net.get_submodule("blocks").children())
        weights = stream(net, machine, "cpu:0", blocks=blocks, host_bytes=0, folder=tmp_path)
        assert weights is not None
        assert all(torch.equal(net.state_dict()[name], each) for name, each in plain.state_dict().items())
        weights.close()
    x = torch.randn(2, 4)
    SGD(net.parameters(), lr=0.1).step()
    assert torch.equal(net(x), plain(x))
