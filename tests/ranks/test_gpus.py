"""What is refused of GPUs, and how: of machines that are only described."""

import stat
from pathlib import Path

import pytest
import torch

from shardwise import environment
from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.parity import command as check_command
from shardwise.ranks import gpus
from shardwise.ranks.first_talk import cannot_connect
from shardwise.ranks.gpus import Found, Gpu
from shardwise.testing.mps import shared_at_once
from shardwise.training import machine_check
from shardwise.training.machine_check import check_gpus
from tests.training.programs import make_job

GIB = 2**30
H200 = Gpu(name="NVIDIA H200", memory_bytes=141 * GIB, capability=(9, 0))
V100 = Gpu(name="Tesla V100-SXM2-16GB", memory_bytes=16 * GIB, capability=(7, 0))
ONE = Found(gpus=(H200,), num_in_machine=1, cuda="12.8")


@pytest.mark.parametrize(
    ("found", "problem", "remedy"),
    [
        (Found(), "was built without CUDA", "pip install torch --index-url"),
        (Found(cuda="12.8"), "this machine has no driver, or no GPU (no /dev/nvidia0)", "nvidia-smi"),
        (
            Found(cuda="12.8", num_in_machine=4, visible=""),
            "CUDA_VISIBLE_DEVICES= hides all 4 GPUs of this machine",
            "CUDA_VISIBLE_DEVICES=0,1,2,3",
        ),
        (Found(cuda="12.8", num_in_machine=2), "this machine has 2 GPUs, and its driver does not answer", "nvidia-smi"),
        *(
            (
                Found(cuda="12.8", num_in_machine=2, visible=each),
                f"={each} hides all 2 GPUs",
                "CUDA_VISIBLE_DEVICES=0,1",
            )
            for each in ("-1", "2", "x", " ", "-1,0", "0,0", "1, 1,", "2,0")
        ),
        *(
            (
                Found(cuda="12.8", num_in_machine=2, visible=each),
                f"this machine has 2 GPUs, and under CUDA_VISIBLE_DEVICES={each} the driver gives torch none",
                "nvidia-smi -L",
            )
            for each in ("0", "1,0", "1, 7", "0,1,,", "GPU-8f2", "MIG-1")
        ),
    ],
)
def test_a_machine_without_a_gpu_is_told_why(found: Found, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        gpus.check_any(found, "--share-gpus", "leave it out")
    assert caught.value.problem.startswith("--share-gpus: ")
    assert problem in caught.value.problem
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith(remedy)
    assert caught.value.remedy.endswith("; or leave it out")
    gpus.check_any(ONE, "--share-gpus", "leave it out")


def test_more_ranks_than_gpus_are_refused_with_how_many_are_hidden_and_by_what() -> None:
    gpus.check_one_each(ONE, 1)
    gpus.check_one_each(Found(), 8)
    with pytest.raises(ShardwiseError, match=r"^4 ranks and 1 GPU on this machine: each rank") as caught:
        gpus.check_one_each(ONE, 4)
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith("--devices 1; or --share-gpus, ")
    hidden = Found(gpus=(H200, H200), num_in_machine=8, visible="0,1", cuda="12.8")
    with pytest.raises(ShardwiseError) as caught:
        gpus.check_one_each(hidden, 4)
    assert "4 ranks and 2 GPUs on this machine (6 more hidden by CUDA_VISIBLE_DEVICES=0,1)" in caught.value.problem
    assert str(caught.value.remedy).startswith("CUDA_VISIBLE_DEVICES=0,1,2,3; or --devices 2; ")


def test_under_torchrun_what_to_type_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "place_under_torchrun", lambda: (0, 4))
    with pytest.raises(ShardwiseError) as caught:
        gpus.check_one_each(ONE, 4)
    assert str(caught.value.remedy).startswith("torchrun --nproc-per-node 1; or SHARDWISE_SHARE_GPUS=1, ")


def test_bf16_on_a_gpu_that_has_none_is_refused() -> None:
    gpus.check_precision([H200], "bf16", "--set precision=fp16")
    gpus.check_precision([V100], "fp16", "--set precision=fp16")
    with pytest.raises(ShardwiseError, match=r"V100-SXM2-16GB is of compute capability 7\.0, and bf16 needs 8\.0"):
        gpus.check_precision([H200, V100], "bf16", "--set precision=fp16")


def test_fp8_where_it_would_be_emulated_is_refused_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_EMULATE_FP8", raising=False)
    gpus.check_precision([H200], "fp8-rows", "")
    with pytest.raises(
        ShardwiseError, match=r"V100-SXM2-16GB is of compute capability 7\.0, and .* need 8\.9"
    ) as caught:
        gpus.check_precision([H200, V100], "fp8", "", key="--set precision")
    assert str(caught.value.remedy).startswith("--set precision=bf16; or SHARDWISE_EMULATE_FP8=1")
    with pytest.raises(ShardwiseError, match="precision=fp8: processors have no products of 8-bit numbers"):
        gpus.check_precision([], "fp8", "")
    monkeypatch.setenv("SHARDWISE_EMULATE_FP8", "1")
    gpus.check_precision([V100], "fp8", "")
    gpus.check_precision([], "fp8", "")


def test_what_does_not_fit_is_told_in_bytes() -> None:
    gpus.check_fits(141 * GIB, H200, what="a run", remedy="less")
    with pytest.raises(ShardwiseError) as caught:
        gpus.check_fits(40 * GIB, H200, what="a run", remedy="less", sharing=8)
    assert caught.value.problem == (
        "a run needs 40.0 GiB on a rank, and NVIDIA H200 has 141.0 GiB, of which each of 8 ranks has 17.6 GiB"
        " (22.4 GiB short)"
    )
    gpus.check_room(GIB, GIB, H200, "Net")
    with pytest.raises(ShardwiseError, match=r"^Net has 4\.0 GiB of weights elsewhere .* \(1\.0 GiB short\)"):
        gpus.check_room(4 * GIB, 3 * GIB, H200, "Net")


def test_ranks_with_different_gpus_are_told_who_has_what() -> None:
    assert gpus.describe_mixed([H200, H200]) is None
    told = str(gpus.describe_mixed([H200, V100, H200]))
    assert "NVIDIA H200 (141.0 GiB) on ranks 0, 2, Tesla V100-SXM2-16GB (16.0 GiB) on rank 1" in told
    assert "a plan has to fit 16.0 GiB" in told


def test_a_run_is_refused_before_a_rank_is_started(tmp_path: Path) -> None:
    job = make_job(tmp_path, "dp=2")
    check_gpus(job, 2, "own", Found())
    check_gpus(job, 2, "own", Found(gpus=(H200, H200), num_in_machine=2, cuda="12.8"))
    check_gpus(job, 2, "shared", ONE)
    with pytest.raises(ShardwiseError, match=r"^2 ranks and 1 GPU"):
        check_gpus(job, 2, "own", ONE)
    with pytest.raises(ShardwiseError, match=r"^--share-gpus: torch"):
        check_gpus(job, 2, "shared", Found())
    small = Found(gpus=(Gpu(name="toy", memory_bytes=2**20, capability=(9, 0)),), num_in_machine=1, cuda="12.8")
    with pytest.raises(ShardwiseError, match=r"^tiny under dp=2 \(mostly .* GiB short\)"):
        check_gpus(job, 2, "shared", small)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_commands_that_ask_for_gpus_in_vain_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tiny", "--devices", "2", "--plan", "dp=2", "--share-gpus", "--folder", str(tmp_path / "run")]
    assert main(words) != 0
    assert "error: --share-gpus: torch" in capsys.readouterr().err
    assert main(["check", "--plan", "dp=2", "--device", "cuda"]) != 0
    assert "error: --device cuda: torch" in capsys.readouterr().err


def test_one_place_asks_what_gpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not here can be tried by describing it there."""
    monkeypatch.setattr(machine_check, "find_gpus", lambda: Found(gpus=(V100,), num_in_machine=1, cuda="12.8"))
    job = make_job(tmp_path, "dp=1,precision=bf16")
    with pytest.raises(ShardwiseError, match=r"bf16 needs 8\.0"):
        check_gpus(job, 1, "own")
    assert check_command._check_device("cpu", job.plan) is None  # type: ignore[func-returns-value]


def test_a_group_that_cannot_connect_is_told_its_interfaces_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    error = cannot_connect(8, "not within 60 s", interfaces=["lo", "docker0", "eth1"])
    assert "the 8 ranks of a group: not within 60 s. NCCL_SOCKET_IFNAME is not set, and" in error.problem
    assert "has the interfaces lo, docker0, eth1" in error.problem
    assert str(error.remedy).startswith("NCCL_SOCKET_IFNAME=eth1 on every machine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    assert "NCCL_SOCKET_IFNAME is ib7" in cannot_connect(2, "no socket interface", interfaces=["lo"]).problem


def fake_control(folder: Path, status: int) -> Path:
    """A control program of the Multi-Process Service that writes down what it is told, and where."""
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(
        f'#!/bin/sh\necho "$@" "$(cat)" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_DEVICE_MAX_CONNECTIONS" >>{folder}/told\n'
        f"exit {status}\n"
    )
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    return folder / "told"


@pytest.mark.parametrize("status", [0, 1])
def test_the_service_is_started_and_quit_and_done_without_where_it_cannot_be(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fake_control(tmp_path, status)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    with shared_at_once(16) as at_once:
        assert at_once is (status == 0)
        pipe = environment.find_variable("CUDA_MPS_PIPE_DIRECTORY")
        assert (pipe is not None) is at_once
        assert environment.find_variable("CUDA_DEVICE_MAX_CONNECTIONS") == ("16" if at_once else None)
    lines = told.read_text().splitlines()
    assert lines[0].startswith("-d  ")
    assert [line.split()[0] for line in lines[1:]] == (["quit"] if at_once else [])
    assert environment.find_variable("CUDA_MPS_PIPE_DIRECTORY") is None


def test_ranks_of_which_no_number_of_queues_is_said_do_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fake_control(tmp_path, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with shared_at_once() as at_once:
        assert not at_once
    assert not told.exists()
