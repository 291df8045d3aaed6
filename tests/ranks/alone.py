"""One rank raises, somewhere in what all ranks do together; what each of them says."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.training.world import World

ENOUGH = "rank 1 has enough"


def fail_on(place: str, where: str) -> None:
    if place == where and dist.get_rank() == 1:
        raise ValueError(ENOUGH)


class Net(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second, self.where = nn.Linear(4, 8), nn.Linear(8, 4), where

    def forward(self, input: Tensor) -> Tensor:
        fail_on("the forward", self.where)
        found: Tensor = self.second(self.first(input))
        return found


class Batch(Mapping[str, Any]):
    """Of which one rank cannot read the tensor."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getitem__(self, name: str) -> Tensor:
        if name != "input":
            raise KeyError(name)
        fail_on("the first batch", self.where)
        return torch.ones(4, 4)

    def __iter__(self) -> Iterator[str]:
        return iter(["input"])

    def __len__(self) -> int:
        return 1


def train(where: str, plan: str) -> None:
    """Make an engine and train, until a rank fails."""

    def loss(output: Tensor, _: Any) -> Tensor:
        fail_on("the loss", where)
        return output.square().mean()

    def optimizer(parameters: Any) -> SGD:
        fail_on("the factory", where)
        return SGD(parameters, lr=0.1)

    is_odd = dist.get_rank() == 1
    module: Any = Net if where == "the arguments" and is_odd else Net(where)
    plan = "dp=2,zero=9" if where == "the plan" and is_odd else plan
    engine = parallelize(module, plan, loss=loss, optimizer=optimizer, example={"input": torch.ones(4, 4)})
    if where == "a look":
        look(engine)
    engine.train_step(Batch(where))
    engine.close()


def look(engine: Engine) -> None:
    """Ask for the state, of which one rank cannot give its part."""

    def broken() -> Any:
        fail_on("a look", "a look")

    if dist.get_rank() == 1:
        engine.states.module.whole = broken  # type: ignore[method-assign]
    engine.state_dict()
    engine.train_step({"input": torch.ones(4, 4)})


def run_world(where: str, plan: str) -> None:
    """What `shardwise train` does around its engine."""
    del plan
    world = World()
    with world.telling():
        world.wait()
        fail_on("a run", where)
        world.gather(1) if where == "a run" else world.highest(1.0)
    world.close()


def told(where: str, plan: str) -> tuple[str, str]:
    """What this rank has raised. It goes on living: nobody sees that it has failed."""
    run: Callable[[str, str], None] = run_world if where == "a run" else train
    try:
        run(where, plan)
    except ShardwiseError as error:
        return type(error).__name__, error.problem
    except ValueError as error:
        return type(error).__name__, str(error)
    return "nothing", ""
