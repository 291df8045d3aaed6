"""Blocks on the host and on disk, streamed to a real GPU: the numbers are those of a module that is all there."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.dataflow.machine import Machine
from shardwise.states.tiers import stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 1024  # A block is 8 MiB: long enough on its way that a wait which is missing is seen.


def a_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(9))
    )


@pytest.mark.parametrize("host_blocks", [None, 0, 4])
def test_forwards_and_gradients_are_those_of_a_module_that_is_all_there(
    tmp_path: Path, host_blocks: int | None
) -> None:
    net = a_net()
    plain = copy.deepcopy(net).cuda()
    host_bytes = None if host_blocks is None else host_blocks * 9 * 2**20
    with Machine(["cuda:0"]) as machine:
        weights = stream(net, machine, "cuda:0", blocks=list(net), host_bytes=host_bytes, folder=tmp_path)
        assert weights is not None
        assert (weights.disk_bytes > 0) == (host_blocks is not None)
        for step in range(3):
            x = torch.randn(8, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            with torch.no_grad():
                for _ in range(3):  # Buffers take turns, and are read into while the GPU is busy.
                    assert torch.equal(net(x), plain(x))
            for each in (net, plain):
                each(x).square().sum().backward()
        for (name, ours), (_, theirs) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
            assert ours.grad is not None, name
            assert theirs.grad is not None, name
            torch.testing.assert_close(ours.grad, theirs.grad.cpu(), rtol=0, atol=0, msg=name)
        weights.close()


def test_weights_that_were_on_their_way_when_they_were_not_wanted_any_more_spoil_nothing() -> None:
    net = a_net()
    plain = copy.deepcopy(net).cuda()
    x = torch.randn(8, WIDTH, device="cuda")
    with Machine(["cuda:0"]) as machine, torch.no_grad():
        weights = stream(net, machine, "cuda:0", blocks=list(net))
        assert weights is not None
        for _ in range(10):
            ours = net(x)
            weights.refresh()  # The first blocks of the next pass are being copied: their memory is given back.
            other = [torch.full((WIDTH, WIDTH), 1.0, device="cuda") for _ in range(8)]
            assert torch.equal(ours, plain(x))
            assert all(bool((each == 1.0).all()) for each in other)
        weights.close()


def test_weights_on_disk_are_trained_as_those_in_memory_are(tmp_path: Path) -> None:
    """Gradients go through four buffers of pinned memory, which have to be empty when they are written to again."""
    nets = [a_net(), a_net()]
    for net, scratch in zip(nets, (None, tmp_path), strict=True):
        with Machine(["cuda:0"]) as machine:
            host_bytes = None if scratch is None else 0
            weights = stream(net, machine, "cuda:0", blocks=list(net), host_bytes=host_bytes, scratch=scratch)
            assert weights is not None
            assert (weights.disk_bytes > 0) == (scratch is not None)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(8, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
                for _ in range(2):
                    net(x).square().sum().backward()
                optimizer.step()
            weights.close()
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())
