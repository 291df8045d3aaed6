"""Plans whose ranks compute on a GPU, over NCCL and over gloo: the losses and weights of one device by plain torch."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.cli import main
from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.nets.transformer import Transformer
from shardwise.parity.models import batch_of, default_settings
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpus
from tests.engine import gpu_plans, gpu_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
V_SCHEDULES = (
    "zb-v",
    "v-half",
    "v-min",
    "interleaved,chunks=2",
    "hanayo,chunks=2",
    "dualpipe",
    "dualpipe-v",
    "chimera",
)

ON_TWO = [
    *(f"pp=2,schedule={each},microbatches=4" for each in (*SCHEDULES, *V_SCHEDULES)),
    "pp=2,schedule=1f1b,microbatches=4,recompute=full",
    "pp=2,schedule=1f1b,microbatches=4,offload.optimizer=1",
    "pp=2,schedule=1f1b,microbatches=4,offload.activations=1",
    "pp=2,schedule=1f1b,microbatches=4,offload.parameters=1",
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp=true",
    "cp=2",
]
OVER_GLOO = ["pp=2,schedule=1f1b,microbatches=4", "pp=2,schedule=zb-v,microbatches=4", "dp=2,zero=1"]


@pytest.mark.parametrize(
    ("gpus", "plans"),
    [("shared", ON_TWO), ("none", OVER_GLOO)],
    ids=["two ranks over NCCL", "two ranks over gloo"],
)
def test_ranks_on_a_gpu_train_what_one_device_trains(gpus: Gpus, plans: Sequence[str]) -> None:
    wrong = gpu_plans.differences(2, gpus, plans)
    assert not wrong, "\n".join(wrong)


def one_step(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Engine, float]:
    engine = parallelize(
        module, "dp=1", loss=gpu_ranks.next_token, optimizer=gpu_ranks.make_optimizer, example=batch, positions=None
    )
    with engine:
        return engine, engine.train_step(batch)


@pytest.mark.parametrize("forgotten", ["nothing", "a buffer", "the batch", "the module"])
def test_what_a_user_forgot_to_move_is_moved_to_the_device_of_the_rank(forgotten: str) -> None:
    losses, _ = gpu_ranks.train_plain()
    module, batch = gpu_ranks.make_module(), gpu_ranks.make_batches()[0]
    if forgotten == "a buffer":
        module.register_buffer("forgotten", torch.ones(1, device="cpu"))
    elif forgotten == "the batch":
        batch = {name: each.cpu() for name, each in batch.items()}
    elif forgotten == "the module":
        module = module.cpu()
    before = list(module.parameters())
    engine, loss = one_step(module, batch)
    assert loss == pytest.approx(losses[0], abs=1e-6)
    assert {each.device.type for each in (*engine.module.parameters(), *engine.module.buffers())} == {"cuda"}
    assert all(one is other for one, other in zip(before, engine.module.parameters(), strict=True))


def test_a_transformer_of_ours_is_made_on_the_gpu_and_trained_there() -> None:
    with torch.device("cuda"):
        module = Transformer(default_settings(Plan.parse("dp=1")))
    assert {each.device.type for each in (*module.parameters(), *module.buffers())} == {"cuda"}
    batch = batch_of(4, 16, 257, 0)
    engine = parallelize(module, "dp=1", loss=next_token_loss, optimizer=gpu_ranks.make_optimizer, example=batch)
    with engine:
        assert engine.train_step(batch) > engine.train_step(batch)


def test_the_first_command_trains_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "--set", "steps=4", "--folder", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert "on 1 x cuda" in told.out + told.err
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["doctor", str(tmp_path / "run")]) == 0


def test_more_ranks_than_gpus_share_them_only_if_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = torch.cuda.device_count() + 1
    words = ["train", "tiny", "--set", "steps=2", "--devices", str(count), "--plan", f"dp={count}"]
    assert main([*words, "--folder", str(tmp_path / "one")]) != 0
    assert "--share-gpus" in capsys.readouterr().err
    assert main([*words, "--folder", str(tmp_path / "two"), "--share-gpus"]) == 0
