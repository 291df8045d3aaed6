"""Real devices: weights, gradients and states of optimizers lie where they should, and the numbers are the same."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.stages.families import make_batch, make_family, recompute
from tests.stages.nets import UNet
from tests.stages.pieces import Net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_gpu_and_the_cpu_train_as_one_device_would(num_microbatches: int) -> None:
    ids = torch.randint(0, 11, (8, 5))
    plain = Net(num_blocks=4)
    speeds = {"cuda:0": 1.0, "cpu": 1.0}
    placed = sw.place(
        copy.deepcopy(plain), ["cuda:0", "cpu"], microbatches=num_microbatches, speeds=speeds, host="compute"
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
    speeds = {"cuda:0": 1.0, "cpu": 1.0}
    placed = sw.place(copy.deepcopy(plain), ["cuda:0", "cpu"], speeds=speeds, host="compute")
    image, moment = torch.randn(4, 3, 16, 16), torch.rand(4)
    torch.testing.assert_close(placed(image, moment)["noise"], plain(image, moment)["noise"], rtol=1e-3, atol=1e-4)


def weight_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_that_has_no_room_on_the_gpu_is_trained_there(recomputes: bool) -> None:
    plain: Any = make_family("llama").train().cuda()
    if recomputes:
        recompute(plain, use_reentrant=False)
    module = copy.deepcopy(plain).cpu()
    budget = {"cuda:0": int(0.75 * 4 * weight_bytes(module))}
    placed = sw.place(module, ["cuda:0", "cpu"], budget=budget)
    assert {each.device.type for each in placed.parameters()} == {"cpu", "cuda"}
    batch = {name: each.cuda() for name, each in make_batch("llama", num_sequences=2).items()}
    losses = []
    for net in (plain, placed):
        optimizer = AdamW(net.parameters(), lr=0.01)
        for _ in range(4):
            for _ in range(2):
                loss = net(**batch, labels=batch["input_ids"]).loss
                assert loss.is_cuda
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net(**batch, labels=batch["input_ids"]).loss.backward()
        losses.append(loss.item())
        assert all(optimizer.state[each]["exp_avg"].device == each.device for each in net.parameters())
        assert all(each.grad is not None and each.grad.device == each.device for each in net.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for (name, one), (_, other) in zip(plain.named_parameters(), placed.named_parameters(), strict=True):
        torch.testing.assert_close(other.cuda(), one, rtol=1e-2, atol=1e-3, msg=name)


def test_a_model_that_has_no_room_on_the_host_either_is_read_from_disk(tmp_path: Path) -> None:
    plain: Any = make_family("llama").eval()
    module = copy.deepcopy(plain)
    # Of four layers three may be on their way.
    budget = {"cuda:0": int(0.85 * weight_bytes(module)), "cpu": 1000}
    placed = sw.place(module, ["cuda:0", "cpu"], budget=budget, folder=tmp_path)
    batch = make_batch("llama", num_sequences=2)
    with torch.no_grad():
        expected = plain.cuda()(**{name: each.cuda() for name, each in batch.items()}).logits.cpu()
        for _ in range(3):
            torch.testing.assert_close(placed(**batch).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_on_the_host_change_nothing_but_the_peak(recomputes: bool) -> None:
    """Bit for bit, and with everything in flight: each step begins before the copies of the last are looked at."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(12)
    ]
    plain, x = nn.Sequential(*blocks).cuda(), torch.randn(4096, 512, device="cuda", requires_grad=True)
    budget = {"cuda:0": "1 GiB"}  # So the window is a twelfth of it.
    peaks, nets = [], []
    for part in (0, 1):
        net = sw.place(copy.deepcopy(plain), ["cuda:0", "cpu"], host="stream", budget=budget, activations_on_host=part)
        optimizer = AdamW(net.parameters(), lr=1e-3)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            optimizer.zero_grad()
            made = checkpoint(net, x, use_reentrant=True) if recomputes else net(x)
            made.square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        nets.append(net)
    assert all(torch.equal(one, other) for one, other in zip(*(each.parameters() for each in nets), strict=True))
    sent = nets[1].activations
    assert sent is not None
    assert sent.sent_bytes == 4 * sent.host_bytes
    # What came and went need not have been there at once.
    assert peaks[1] < peaks[0] - sent.host_bytes / 4


def test_a_pipeline_of_a_gpu_and_the_cpu_sends_what_the_gpu_saves() -> None:
    ids = torch.randint(0, 11, (64, 5))
    options: dict[str, Any] = {"microbatches": 4, "speeds": {"cuda:0": 1.0, "cpu": 1.0}, "host": "compute"}
    nets = [sw.place(Net(num_blocks=4), ["cuda:0", "cpu"], activations_on_host=part, **options) for part in (0, 1)]
    for net in nets:
        net(ids).square().mean().backward()
    assert nets[1].activations is not None
    assert set(nets[1].activations.parts) == {"cuda:0"}
    assert nets[1].activations.sent_bytes > 0
    for one, other in zip(*(each.parameters() for each in nets), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
