"""What a plan keeps on the host, beside a GPU: the same training bit for bit, and memory that is no longer taken."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.dataflow.machine import Machine
from shardwise.engine.parallelize import parallelize
from shardwise.states.tiers import HostUpdates
from shardwise.states.tiers import host_states as states
from tests.stages.odd_nets import Chain, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def mean_square(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return torch.nn.functional.mse_loss(output, batch["x"])


def train(plan: str, clip: float | None = None) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the bytes on the host."""
    torch.manual_seed(0)
    module = Chain(num_blocks=6).cuda()
    batches = [{"x": torch.randn(64, *rows().shape[1:], device="cuda")} for _ in range(4)]
    engine = parallelize(
        module,
        plan,
        loss=mean_square,
        optimizer=lambda some: AdamW(some, lr=1e-2, fused=True),
        example=batches[0],
        clip=clip,
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
    offloaded_losses, offloaded_weights, host_bytes = train(f"{plan},{host}")
    assert host_bytes > 0
    assert offloaded_losses == losses
    assert all(torch.equal(each, weights[name]) for name, each in offloaded_weights.items())


@pytest.mark.parametrize("host", ["offload.optimizer=1", "offload.optimizer=0.5", "offload.parameters=1"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_many_chunks_in_few_buffers_are_the_same_bits(
    host: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, weights, _ = train("microbatches=2", clip)
    monkeypatch.setattr(states, "STAGING_BYTES", 1024)
    for count in (1, 3):
        monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", count)
        offloaded_losses, offloaded_weights, _ = train(f"microbatches=2,{host}", clip)
        assert offloaded_losses == losses
        assert all(torch.equal(each, weights[name]) for name, each in offloaded_weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("buffer_bytes", [2**16, 2**20])
def test_a_loop_of_ones_own_trains_to_the_same_bits_with_its_state_on_the_host(
    dtype: torch.dtype, clip: float | None, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "STAGING_BYTES", buffer_bytes)
    found = []
    for on_host in (1.0, 0.5, 0.0):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to("cuda", dtype)
        with Machine(["cuda:0"]) as machine:
            updates = HostUpdates(
                module,
                list(module),
                lambda some: AdamW(some, lr=1e-2, fused=True),
                machine,
                "cuda:0",
                on_host=on_host,
                clip=clip,
                staging_bytes=4 * buffer_bytes,
            )
            for _ in range(8):
                loss = module(torch.randn(64, 256, device="cuda", dtype=dtype)).square().mean()
                loss.backward()
                updates.step()
                loss.item()
            updates.close()
        found.append([each.detach().cpu() for each in module.parameters()])
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))
