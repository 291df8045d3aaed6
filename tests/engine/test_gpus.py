"""Plans of several processes on GPUs train as on CPUs.

Where there is a GPU for each rank, NCCL carries what they say; ranks that share one talk over the host.
"""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from shardwise.engine.parallelize import parallelize
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import spawn
from shardwise.stages.stage import Batch
from tests.stages.pieces import Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PLANS = [
    "pp=2,microbatches=4",
    "pp=2,schedule=zb-h1,microbatches=4",
    "pp=2,schedule=zb-v,microbatches=4",
    "pp=2,schedule=dualpipe-v,microbatches=8",
    "pp=4,microbatches=4",
    "pp=4,schedule=interleaved,chunks=2,microbatches=4",
    "pp=4,schedule=dualpipe,microbatches=8",
    "pp=4,schedule=chimera,microbatches=4",
    "dp=2,microbatches=2",
    "dp=2,zero=3,microbatches=2",
    "pp=2,dp=2,zero=1,microbatches=2",
    "pp=2,dp=2,zero=2,microbatches=2",
]


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def _train(device: str, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and of an evaluation, and the weights then."""
    number = dist.get_rank() % torch.cuda.device_count() if device == "cuda" and dist.is_initialized() else 0
    home = torch.device(device, number) if device == "cuda" else torch.device(device)
    net = Net(8, width=16).double().to(home)
    ids = torch.randint(0, 11, (16, 7), generator=torch.Generator().manual_seed(1)).to(home)
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
    with parallelize(net, plan, loss=_loss, optimizer=_sgd, example=batch, clip=1.0) as engine:
        losses = [engine.train_step(batch) for _ in range(3)]
        losses.append(engine.evaluate(batch))
        state = {name: each.cpu() for name, each in engine.state_dict().items()}
    return losses, state


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_trains_on_gpus_as_one_process_on_the_cpu(plan: str) -> None:
    expected_losses, expected = _train("cpu", f"microbatches={Plan.parse(plan).microbatches}")
    for losses, state in spawn(_train, Plan.parse(plan).num_ranks, ("cuda", plan), timeout_seconds=240):
        torch.testing.assert_close(losses, expected_losses)
        torch.testing.assert_close(state, expected)
