"""`shardwise check` as it is typed: what it prints, its JSON, its exit status."""

import json

import pytest

from shardwise.cli import main

#: Ranks are forked where those that tests share are.
pytestmark = pytest.mark.xdist_group("parity")


def test_a_plan_that_is_right_says_so_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plan", "tp=2", "--model", "qwen3-0.6b", "--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert "tp=2 on 2 ranks, 2 steps" in told
    assert "qwen3-0.6b: 2 layers of width 32, 4 heads (2 of keys), vocabulary 256, tied" in told
    assert "the same as on one device" in told


def test_a_fault_exits_with_1_and_names_the_tensor_and_its_owners(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--plan", "tp=2", "--steps", "1", "--inject", "swapped-shard"]
    assert main([*words, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False
    assert set(data["max_relative_error"]) == {"loss", "gradient", "norm", "weight", "evaluation"}
    assert data["max_relative_error"]["weight"] > 1e-5
    first = data["first_difference"]
    assert (first["kind"], first["step"]) == ("used weight", 0)
    assert first["tensor"] == "layers.0.attention.q_proj.weight"
    assert first["owners"] == [f"rank {rank}: stage 0, 16 of 32 along dim 0" for rank in range(2)]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "not the same as on one device" in told
    assert "first to differ: the used weight of layers.0.attention.q_proj.weight in step 0 on rank" in told
    assert "  rank 1: stage 0, 16 of 32 along dim 0" in told


def test_a_users_module_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check",
        "--plan",
        "dp=2,zero=2,microbatches=2",
        "--module",
        "tests.parity.given_nets:regression",
        "--json",
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert data["first_difference"] is None
    assert data["model"] == "tests.parity.given_nets:regression"


def test_a_mistake_that_ranks_find_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--plan", "dp=2,microbatches=3", "--module", "tests.parity.given_nets:regression"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "cannot be cut into" in told
    assert "Traceback" not in told
