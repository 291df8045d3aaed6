"""A module that this machine has no memory for is refused before a rank is started, with bytes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.parity import memory_check
from shardwise.parity.memory_check import check_memory
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpu

#: 1 MiB of weights.
MIB = 2**20
MODULE = nn.Linear(512, 512, bias=False)
DP2 = Plan.parse("dp=2")
H = Gpu(name="a GPU", memory_bytes=5 * MIB, capability=(9, 0))


def test_what_fits_to_the_byte_is_taken_and_a_byte_less_is_not() -> None:
    # Three steps: 9 MiB to compare, the module with gradients, and twice for ranks; 1 MiB of it is there.
    check_memory(MODULE, DP2, num_steps=3, available=12 * MIB)
    with pytest.raises(ShardwiseError) as caught:
        check_memory(MODULE, DP2, num_steps=3, available=12 * MIB - MIB // 2)
    assert caught.value.problem == (
        "Linear under dp=2 needs 12.0 MiB more of this machine's memory, for 1.0 MiB of weights, 2 ranks and 3 steps"
        " that are compared; 11.5 MiB are available (512.0 KiB short)"
    )
    assert "--steps 1" in str(caught.value.remedy)


def test_on_a_gpu_the_ranks_that_share_it_and_the_one_device_count() -> None:
    check_memory(MODULE, DP2, num_steps=1, gpus=[H], available=2**40)
    with pytest.raises(ShardwiseError, match=r"needs 6\.0 MiB on a GPU.*4 ranks there; a GPU has 5\.0 MiB \(1\.0"):
        check_memory(MODULE, Plan.parse("dp=4"), num_steps=1, gpus=[H], available=2**40)
    # Two GPUs have two ranks each.
    check_memory(MODULE, Plan.parse("dp=4"), num_steps=1, gpus=[H, H], available=2**40)


def test_a_module_without_numbers_is_counted_once() -> None:
    with torch.device("meta"):
        large = nn.Linear(512, 512, bias=False)
    check_memory(large, Plan.parse("dp=32,zero=3"), num_steps=1, available=7 * MIB)
    with pytest.raises(ShardwiseError, match="short"):
        check_memory(large, Plan.parse("dp=32,zero=3"), num_steps=1, available=6 * MIB)


@pytest.mark.parametrize("more", [[], ["--nccl"]])
def test_the_command_refuses_it_before_a_rank_starts(
    more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1000)
    monkeypatch.setattr("shardwise.ranks.spawn.Ranks.__init__", lambda *_, **__: pytest.fail("ranks were started"))
    assert main(["check", "--plan", "dp=2", *more]) == 1
    told = capsys.readouterr().err
    assert "under dp=2 needs" in told
    assert "1000 B are available" in told
