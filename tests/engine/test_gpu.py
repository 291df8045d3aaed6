"""Plans whose ranks compute on a GPU, over NCCL and over gloo: the losses and weights of one device by plain torch."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwise.ranks.spawn import Ranks
from tests.engine import gpu_ranks

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
ON_FOUR = [
    *(f"pp=4,schedule={each},microbatches=8" for each in ("1f1b", "zb-h2", "zb-v", "dualpipe", "chimera")),
    "pp=4,schedule=interleaved,chunks=2,microbatches=4",
    "pp=2,dp=2,schedule=1f1b,microbatches=4",
    "pp=2,dp=2,zero=1,schedule=zb-v,microbatches=4",
    "pp=2,dp=2,zero=3,schedule=1f1b,microbatches=4",
    "pp=2,tp=2,sp=true,schedule=1f1b,microbatches=4",
    "pp=2,cp=2,schedule=zb-h1,microbatches=4",
    "dp=2,tp=2,zero=2",
]
OVER_GLOO = ["pp=2,schedule=1f1b,microbatches=4", "pp=2,schedule=zb-v,microbatches=4", "dp=2,zero=1"]


@pytest.mark.parametrize(
    ("num_ranks", "backend", "plans"),
    [
        (2, "cpu:gloo,cuda:nccl", ON_TWO),
        (4, "cpu:gloo,cuda:nccl", ON_FOUR),
        (2, "gloo", OVER_GLOO),
    ],
    ids=["two ranks over NCCL", "four ranks over NCCL", "two ranks over gloo"],
)
def test_ranks_on_a_gpu_train_what_one_device_trains(
    num_ranks: int, backend: str, plans: Sequence[str], tmp_path: Path
) -> None:
    losses, weights = gpu_ranks.train_plain()
    wrong: list[str] = []
    left = list(plans)
    while left:
        # After a failure there are new ranks, and the plans after it are tried all the same.
        with Ranks(num_ranks) as ranks:
            folder = tmp_path / str(len(left))
            folder.mkdir()
            ranks.run(gpu_ranks.join_over, backend, str(folder), timeout_seconds=120)
            try:
                found = ranks.run(gpu_ranks.train_plans, left, timeout_seconds=500)
            except Exception as error:
                found = [{left[0]: f"{type(error).__name__}: {error}"}]
        for plan, told in found[0].items():
            left.remove(plan)
            if isinstance(told, str):
                wrong.append(f"{plan}: {told}")
                continue
            worst = max(abs(ours - theirs) for ours, theirs in zip(told[0], losses, strict=True))
            apart = max(float((told[1][name] - each).abs().max()) for name, each in weights.items())
            if worst > 1e-5 or apart > 1e-5:
                wrong.append(f"{plan}: losses are {worst:.2g} apart, weights {apart:.2g}")
    assert not wrong, "\n".join(wrong)
