"""Ranks that see different costs cut a module at one place; a cut that cannot be is told in the keys of a plan."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.agreement import agree_on_costs
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.telling import watched
from shardwise.stages.split.outline import outline_of
from shardwise.stages.split.unit_flow import UnitCall
from tests.ranks import telling


def costs_of_a_rank(names: list[list[str]]) -> list[tuple[float, float, float]]:
    rank = dist.get_rank()
    calls = [
        UnitCall(
            name=name, unit=name, outline=outline_of(None, [], set()), signature=(), needs=frozenset(),
            flops=100.0 * rank, bytes=10.0 * number, touched=frozenset(), weight_bytes=2.0 * rank,
        )
        for number, name in enumerate(names[rank])
    ]  # fmt: skip
    with watched(None) as watch:
        agree_on_costs(partial(watch.exchange, what="costs"), calls)
    return [(each.flops, each.bytes, each.weight_bytes) for each in calls]


def test_all_ranks_go_by_the_mean_of_what_each_has_seen(two: Ranks) -> None:
    found = two.run(costs_of_a_rank, [["embed", "head"], ["embed", "head"]])
    assert found[0] == found[1] == [(50.0, 0.0, 1.0), (50.0, 10.0, 1.0)]


def test_ranks_that_have_called_different_units_say_so(two: Ranks) -> None:
    with pytest.raises(ShardwiseError, match="which units run depends on the data"):
        two.run(costs_of_a_rank, [["embed", "head"], ["embed", "block", "head"]])


def test_a_cut_that_cannot_be_is_told_in_the_keys_of_a_plan() -> None:
    with pytest.raises(ShardwiseError) as error:
        telling.train("pp=2,layers=0+2")
    assert error.value.remedy is not None
    assert error.value.remedy.startswith("layers=3+2 ")


class Bare(nn.Module):
    """A module that calls no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Embedding(3, 2).weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_a_module_without_units_is_one_stage_and_no_more() -> None:
    module, batch = Bare(), {"x": torch.ones(2, 2)}
    options = {"loss": lambda output, _: output.mean(), "optimizer": telling.OPTIMIZERS["sgd"](), "example": batch}
    before = float(module(batch["x"]).detach().mean())
    with parallelize(module, "dp=1", **options) as engine:
        assert engine.train_step(batch) == pytest.approx(before)
        assert engine.train_step(batch) < before
    with pytest.raises(ShardwiseError, match="Bare calls no module that has parameters"):
        parallelize(Bare(), "pp=2,microbatches=2", **options)
