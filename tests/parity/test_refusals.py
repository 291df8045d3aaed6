"""What does not compose is refused before anything is launched, by engines and by the command alike."""

import multiprocessing

import pytest
import torch
from torch import nn

from shardwise.cli import main
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from tests.planner.refused import REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_compose_is_refused_before_a_rank_is_started(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, problem, remedy = REFUSED[name]
    with pytest.raises(ShardwiseError) as caught:
        parallelize(
            nn.Linear(2, 2),
            text,
            loss=lambda output, batch: output.sum() * len(batch),
            optimizer=torch.optim.AdamW,
            example={"input": torch.ones(8, 2)},
        )
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)
    before = len(multiprocessing.active_children())
    assert main(["check", "--plan", text]) == 1
    assert capsys.readouterr().err == f"error: {problem}\n  try: {remedy}\n"
    assert len(multiprocessing.active_children()) == before
