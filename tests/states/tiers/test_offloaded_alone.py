"""The engine of a mesh on one rank, with its weights on the host: the same training bit for bit, beside a GPU too."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.engine.assemble import assemble
from shardwise.engine.options import Options
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import OneProcess
from shardwise.states import host as room
from shardwise.states.tiers import host_states as states
from tests.crowd import Crowds
from tests.engine import going_on
from tests.stages.odd_nets import Chain, rows

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def mean_square(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return torch.nn.functional.mse_loss(output, batch["x"])


def train(plan: str, device: str, clip: float | None) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the bytes on the host. No axis is cut: with zero=3 a rank gathers from itself."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.manual_seed(0)
    module = Chain(num_blocks=6).to(device)
    batches = [{"x": torch.randn(64, *rows().shape[1:], device=device)} for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "STAGING_BYTES", 1024)
        patch.setattr(room, "DEFERRED_FREE_BYTES", 1024)
        wires = OneProcess(Plan.parse(plan))
        engine = assemble(
            module,
            wires.mesh.plan,
            loss=mean_square,
            optimizer=going_on.OPTIMIZERS["adamw"],
            example=batches[0],
            options=Options(clip=clip, bucket_bytes=1500),
            wires=wires,
            owns_wires=True,
        )
        with engine:
            losses = [engine.train_step(batch) for batch in batches]
            return losses, {name: each.cpu() for name, each in engine.state_dict().items()}, engine.host_bytes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(
    ("plan", "host", "clip"),
    [
        ("microbatches=4", "offload.parameters=1", None),
        ("microbatches=2,zero=2", "offload.parameters=1", 0.1),
        ("microbatches=2,zero=3", "offload.parameters=1", 0.1),
        # Updates run on under the next forward, whose units wait for their own weights.
        ("microbatches=2", "offload.optimizer=1", None),
        ("microbatches=2", "offload.optimizer=0.5", 0.1),
    ],
)
def test_one_rank_trains_to_the_same_bits(
    plan: str, host: str, clip: float | None, device: str, crowds: Crowds
) -> None:
    (ours,) = crowds.of(1).run(train, f"{plan},{host}", device, clip)
    (theirs,) = crowds.of(1).run(train, plan, device, clip)
    assert ours[0] == theirs[0]
    assert all(torch.equal(each, theirs[1][name]) for name, each in ours[1].items())
    assert ours[2] > 0 == theirs[2]
