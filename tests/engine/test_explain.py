"""What an engine says of what became of the module."""

import torch
from torch import nn
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from tests.crowd import Crowds
from tests.habits.harness import batch, cross_entropy, small_net


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        made: torch.Tensor = self.layer(x)
        return made


def explained(plan: str, **options: object) -> str:
    module = small_net(block=Counts)
    engine = parallelize(module, plan, loss=cross_entropy, optimizer=lambda p: SGD(p, 0.1), example=batch(0), **options)  # type: ignore[arg-type]
    with engine:
        return engine.explain()


def test_stages_what_goes_between_them_and_what_forwards_write() -> None:
    lines = explained("pp=2").splitlines()
    assert lines[0] == "plan: pp=2"
    assert lines[1].startswith("stage 0: embed")
    assert any(line.startswith("stage 0 to 1: layers.") for line in lines)
    assert "attributes that forwards write: seen, seen" in lines
    assert "stages were not tried on a second batch: verify=False" in explained("pp=2", verify=False)


class Twice(nn.Module):
    """A block that is cut over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return made


def tensor_lines() -> list[str]:
    module = small_net(block=Twice)
    with parallelize(module, "tp=2", loss=cross_entropy, optimizer=lambda p: SGD(p, 0.1), example=batch(0)) as engine:
        assert engine.sharded.tensor is not None
        object.__setattr__(engine.sharded.tensor, "unverified", "no copy of it could be made")
        return engine.explain().splitlines()


def test_layers_that_were_not_compared_with_the_whole_are_told(crowds: Crowds) -> None:
    for lines in crowds.of(2).run(tensor_lines):
        assert "not compared with the whole module: no copy of it could be made" in lines
        assert any(line.startswith("layers.*.up: ") for line in lines)
