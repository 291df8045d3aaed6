"""What a plan keeps on the host, beside a GPU: the same training bit for bit, and memory that is no longer taken."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from shardwise.runtime.parallel import parallelize
from tests.runtime.odd_nets import Chain, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def mean_square(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return torch.nn.functional.mse_loss(output, batch["x"])


def train(plan: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the bytes on the host."""
    torch.manual_seed(0)
    module = Chain(num_blocks=6).cuda()
    batches = [{"x": torch.randn(64, *rows().shape[1:], device="cuda")} for _ in range(4)]
    engine = parallelize(
        module, plan, loss=mean_square, optimizer=lambda some: AdamW(some, lr=1e-2, fused=True), example=batches[0]
    )
    losses = [engine.train_step(batch) for batch in batches]
    return losses, {name: each.cpu() for name, each in engine.state_dict().items()}, engine.host_bytes


@pytest.mark.parametrize("plan", ["microbatches=1", "microbatches=2", "pp=2,schedule=zb-v,microbatches=4"])
@pytest.mark.parametrize(
    "host",
    [
        "offload.optimizer=1",
        "offload.activations=1",
        "offload.optimizer=0.5,offload.activations=1",
        "offload.parameters=1",
        "offload.parameters=0.5,offload.activations=1",
    ],
)
def test_a_gpu_trains_to_the_same_bits_with_a_host(plan: str, host: str) -> None:
    losses, weights, _ = train(plan)
    hosted_losses, hosted_weights, host_bytes = train(f"{plan},{host}")
    assert host_bytes > 0
    assert hosted_losses == losses
    assert all(torch.equal(each, weights[name]) for name, each in hosted_weights.items())
