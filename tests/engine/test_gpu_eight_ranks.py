"""Eight ranks that share a GPU, as a command starts them."""

import pytest
import torch

from shardwise.cli import main


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_plan_of_eight_is_checked_on_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plan", "dp=2,tp=2,pp=2,microbatches=2", "--device", "cuda", "--steps", "1"]) == 0
    assert "8 ranks share 1 GPU" in capsys.readouterr().out or torch.cuda.device_count() > 1
