"""Real devices: weights, gradients and states of optimizers lie where they should, and the numbers are the same."""

import copy

import pytest
import torch
from torch.optim import AdamW

import shardwise as sw
from tests.runtime.nets import UNet
from tests.runtime.pieces import Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_gpu_and_the_cpu_train_as_one_device_would(num_microbatches: int) -> None:
    ids = torch.randint(0, 11, (8, 5))
    plain = Net(num_blocks=4)
    placed = sw.place(
        copy.deepcopy(plain), ["cuda:0", "cpu"], microbatches=num_microbatches, speeds={"cuda:0": 1.0, "cpu": 1.0}
    )
    optimizer = AdamW(placed.parameters())
    output = placed(ids)
    assert output.device.type == "cpu"
    output.square().mean().backward()
    plain(ids).square().mean().backward()
    optimizer.step()
    kinds = {each.device.type for each in placed.parameters()}
    assert kinds == {"cpu", "cuda"}
    for one, other in zip(plain.parameters(), placed.parameters(), strict=True):
        assert other.grad is not None
        assert optimizer.state[other]["exp_avg"].device == other.device
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-3, atol=1e-5)


def test_skips_meet_across_devices() -> None:
    plain = UNet()
    placed = sw.place(copy.deepcopy(plain), ["cuda:0", "cpu"], speeds={"cuda:0": 1.0, "cpu": 1.0})
    image, moment = torch.randn(4, 3, 16, 16), torch.rand(4)
    torch.testing.assert_close(placed(image, moment)["noise"], plain(image, moment)["noise"], rtol=1e-3, atol=1e-4)
