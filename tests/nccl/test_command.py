"""`shardwise check --nccl` as it is typed: what it prints, its JSON, its exit status."""

import json

import pytest

from shardwise.cli import main

#: Ranks are forked where those that tests share are.
pytestmark = pytest.mark.xdist_group("ranks")


def test_a_plan_that_is_right_says_what_was_looked_at_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--nccl", "--plan", "pp=2,microbatches=2", "--model", "gpt2", "--steps", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["problems"], data["ranks"], data["steps"]) == (True, [], 2, 1)
    # The pipeline, the world, a link each way, and the tied embedding.
    assert data["communicators"] == 4
    assert data["operations"] > 20
    assert data["waits"] >= data["operations"]
    assert data["streams"] == 2 * (1 + data["communicators"])
    assert data["device"] == "cpu"


def test_a_users_sum_that_is_not_waited_for_is_told_with_rank_step_and_instruction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--nccl", "--plan", "dp=2", "--module", "tests.nccl.hasty_net:factory", "--steps", "1"]) == 1
    told = capsys.readouterr().out
    assert "dp=2 on 2 ranks, 1 step" in told
    assert "rank 0 reads 32 bytes in step 0 at 0F0" in told
    assert "while all_reduce (sum) of 8 float32 on communicator 0 (the default group, ranks 0 1)" in told
    assert "stream compute has not waited for it" in told
    assert "  look at: " in told
