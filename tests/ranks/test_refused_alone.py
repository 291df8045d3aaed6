"""A rank that refuses alone, over wires that engines share, leaves nobody waiting; where all refuse, wires go on."""

from typing import Any

import torch
from torch import nn

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.wires import make_wires
from shardwise.states.parameter_group import Share
from tests.ranks.telling import Net, batch_of, loss_of

_LIMIT_SECONDS = 2.0


def _make(wires: Any, *, refuses: bool) -> str:
    """What came of an engine whose optimizer factory refuses, or not."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        if refuses:
            raise ShardwiseError("no optimizer today", remedy="tomorrow")
        return torch.optim.SGD(parameters, lr=0.1)

    try:
        parallelize(Net(), "dp=2", loss=loss_of, optimizer=[Share(make=make)], example=batch_of(0), wires=wires).close()
    except ShardwiseError as error:
        return str(error).partition("\n")[0]
    return "made"


def refused_by(ranks: tuple[int, ...]) -> tuple[str, str]:
    """A first engine that these ranks refuse, and a second over the same wires."""
    wires = make_wires(Plan.parse("dp=2"), limit_seconds=_LIMIT_SECONDS)
    first = _make(wires, refuses=wires.rank in ranks)
    second = _make(wires, refuses=False)
    wires.close()
    return first, second


def test_wires_can_be_used_on_where_all_ranks_refuse(two: Ranks) -> None:
    for first, second in two.run(refused_by, (0, 1)):
        assert (first, second) == ("no optimizer today", "made")


def test_the_others_are_told_by_a_rank_that_refuses_alone(two: Ranks) -> None:
    (own, _), (told, _) = two.run(refused_by, (0,))
    assert own == "no optimizer today"
    # Not that nobody has answered for as long as these wires wait.
    assert told == "rank 0 failed: no optimizer today"


def read_alone() -> str:
    """What came of a script that prints a norm between steps, of a layer that one rank has."""
    engine = parallelize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "pp=2", loss=lambda output, _: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), example={"input": torch.ones(4, 4)},
    )  # fmt: skip
    try:
        for _ in range(2):
            engine.train_step({"input": torch.ones(4, 4)})
            next(engine.module.parameters()).norm()
    except ShardwiseError as error:
        engine.close()
        return str(error).partition("\n")[0]
    return "trained"


def test_the_others_are_told_what_ended_a_rank_between_two_steps(two: Ranks) -> None:
    other, own = two.run(read_alone)
    assert own == "0.weight cannot be read or written on this rank: it is on another stage of the pipeline (pp=2)"
    # Not that rank 1 is gone, with a broken connection.
    assert other == f"rank 1 failed: {own}"
