"""What has no room on a device is streamed from the host. Here both are the CPU's memory."""

import copy

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.runtime.placing.host import HostWeights, find_streams
from shardwise.runtime.placing.places import Place
from tests.runtime.pieces import Net

HOST = Place(name="cpu", device=torch.device("cpu"), room_bytes=2**30, speed=1.0)


def a_device(room_bytes: int) -> Place:
    return Place(name="cpu:0", device=torch.device("cpu"), room_bytes=room_bytes, speed=1.0)


def test_a_module_computes_the_same_and_its_state_is_whole() -> None:
    module = Net(num_blocks=8).eval()
    plain, ids = copy.deepcopy(module), torch.randint(0, 11, (4, 5))
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    weights = HostWeights(module, a_device(size - 200), HOST)
    on_host = [name for name, place in weights.where.items() if place is HOST]
    assert 0 < len(on_host) < len(weights.where)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(ids), plain(ids))
    state = weights.state(module.state_dict())
    assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())
    with pytest.raises(ShardwiseError, match=r"load_state_dict\(...\) after `place`: \d+ weights are on the host"):
        weights.refuse("load_state_dict(...)")


def test_what_fits_stays() -> None:
    weights = HostWeights(Net(num_blocks=2).eval(), a_device(2**20), HOST)
    assert all(place.name == "cpu:0" for place in weights.where.values())
    weights.refuse("load_state_dict(...)")


def test_only_a_module_that_is_not_trained_is_streamed_and_only_beside_one_gpu() -> None:
    gpu = Place(name="cuda:0", device=torch.device("cuda:0"), room_bytes=2**20, speed=1.0)
    module = Net(num_blocks=2)
    assert find_streams(module, (gpu, HOST)) is None
    assert find_streams(module.eval(), (gpu, HOST)) == (gpu, HOST)
    assert find_streams(module, (HOST, gpu)) == (gpu, HOST)
    assert find_streams(module, (a_device(1), HOST)) is None
