"""An executor runs every instruction of a schedule, or says which it does not run."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.errors import ShardwiseError
from shardwise.execution import local, process
from shardwise.execution.executor import RUN_BESIDE, check_kinds
from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import complete, schedule_of
from shardwise.execution.process import ProcessExecutor
from shardwise.planner.plan import Plan
from shardwise.schedule.instruction import Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Batch
from tests.stages.pieces import Net, cut_by_hand


def loss(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def offloaded(text: str = "pp=2,microbatches=2") -> Schedule:
    split = cut_by_hand(Net(2))
    return complete(schedule_of(Plan.parse(text)), split, offloads_activations=True)


@pytest.mark.parametrize("executor", [local, process])
def test_every_kind_has_its_place_in_an_executor(executor: Any) -> None:
    run = executor.RUN | RUN_BESIDE
    assert run | executor.LEFT.keys() == set(Kind)
    assert not run & executor.LEFT.keys()


def test_a_kind_that_an_executor_does_not_run_is_refused_before_anything_is_run() -> None:
    with pytest.raises(ShardwiseError) as caught:
        check_kinds(offloaded(), set(Kind) - {Kind.OFFLOAD}, "the executor of one process")
    assert caught.value.problem == "0OFFLOAD0 is an instruction that the executor of one process does not run"
    assert caught.value.remedy == "the schedule 1f1b without OFFLOAD"


def test_executors_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "RUN", local.RUN - {Kind.RELOAD})
    monkeypatch.setattr(process, "RUN", process.RUN - {Kind.RELOAD})
    split = cut_by_hand(Net(2))
    with pytest.raises(ShardwiseError, match="0RELOAD0 is an instruction that the executor of one process does not"):
        LocalExecutor(offloaded(), split, loss)
    unused: Any = None
    with pytest.raises(ShardwiseError, match="0RELOAD0 is an instruction that the executor of one rank without"):
        ProcessExecutor(0, offloaded(), split, loss, transport=unused, on_reduce=unused)


def test_weights_that_are_to_be_gathered_are_with_replicas_alone() -> None:
    split, unused = cut_by_hand(Net(2)), None
    gathers = complete(schedule_of(Plan.parse("pp=2,microbatches=2")), split, max_gathered=1)
    with pytest.raises(ShardwiseError, match="0GATHER0 is an instruction that the executor of one rank without"):
        ProcessExecutor(0, gathers, split, loss, transport=unused, on_reduce=unused)  # type: ignore[arg-type]


def test_an_offload_with_nobody_to_take_it_is_refused() -> None:
    executor = LocalExecutor(offloaded(), cut_by_hand(Net(2)), loss)
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(ShardwiseError) as caught:
        executor.run([batch, batch])
    assert caught.value.problem == "0OFFLOAD0 moves activations, and nothing is there that takes them to the host"


class Moves:
    """Notes what a schedule says of activations, and moves none."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def saving(self, stays: Any, kept: Any, name: Any = None) -> Any:  # noqa: ARG002
        self.told.append(f"save {name}")
        return torch.enable_grad()

    def offload(self, name: Any) -> None:
        self.told.append(f"offload {name}")

    def reload(self, name: Any) -> None:
        self.told.append(f"reload {name}")

    def put_away(self, name: Any = None) -> None:
        self.told.append(f"put away {name}")


def test_a_schedule_says_when_activations_leave_and_come_back() -> None:
    executor, moves = LocalExecutor(offloaded("pp=2,schedule=gpipe,microbatches=2"), cut_by_hand(Net(2)), loss), Moves()
    executor.interpreters[0].offload, executor.interpreters[1].offload = moves, Moves()
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64)}
    executor.run([batch, batch])
    # 0F0 0OFFLOAD0 0RELOAD0 0F1 0OFFLOAD1 0RELOAD1 0B0 0B1: a computation ahead.
    assert moves.told == [
        "save (0, 0)",
        "offload (0, 0)",
        "reload (0, 0)",
        "save (0, 1)",
        "offload (0, 1)",
        "reload (0, 1)",
    ]
