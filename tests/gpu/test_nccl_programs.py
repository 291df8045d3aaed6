"""The comparison of what GPUs were asked for with what was rehearsed, on programs written by hand."""

import pytest

from shardwise.nccl.program import Program
from tests.gpu.nccl_programs import first_difference, main
from tests.nccl.making import Rank, all_reduce, pair, send


def programs(*, count: int = 10) -> list[Program]:
    return [
        Rank(0).make(pair()).program(),
        _issuing(Rank(1).make(pair()), count),
    ]


def _issuing(rank: Rank, count: int) -> Program:
    rank.wait(rank.issue(send(0)))
    rank.issue(all_reduce(count=count))
    return rank.program()


def test_the_same_programs_do_not_differ_whatever_is_waited_for_when() -> None:
    assert first_difference(programs(), programs()) is None


def test_the_first_operation_that_differs_is_told() -> None:
    assert first_difference(programs(), programs(count=11)) == (
        "rank 1, 2: on a GPU all_reduce (sum) of 10 float32 on 1, rehearsed all_reduce (sum) of 11 float32 on 1"
    )


def test_without_a_gpu_nothing_is_tried_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 1
    assert capsys.readouterr().err == "no GPU was found: nothing was tried\n"
