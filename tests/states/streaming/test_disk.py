"""Blocks that stay on disk: the same numbers as without, and files that are not what they should be."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.states.tiers import StreamedWeights, stream
from tests.states.streaming.test_weights import Net, assert_trains_as


@pytest.fixture
def machine() -> Iterator[Machine]:
    torch.manual_seed(0)
    with Machine(["cpu:0"]) as found:
        yield found


def streamed(machine: Machine, net: Net, folder: Path, host_bytes: int = 3 * 2**13) -> StreamedWeights:
    weights = stream(net, machine, "cpu:0", blocks=list(net.blocks), host_bytes=host_bytes, folder=folder)
    assert weights is not None
    return weights


@pytest.mark.parametrize("host_bytes", [0, 3 * 2**13])
def test_what_the_host_has_no_room_for_is_written_and_read_in_every_pass(
    machine: Machine, tmp_path: Path, host_bytes: int
) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    weights = streamed(machine, net, tmp_path / "new", host_bytes)
    assert weights.host_bytes <= host_bytes < weights.host_bytes + weights.disk_bytes
    assert weights.host_bytes + weights.disk_bytes == 8 * weights.disk_bytes // len(list((tmp_path / "new").iterdir()))
    assert_trains_as(net, plain)
    weights.close()
    x = torch.randn(2, 4)
    assert torch.equal(net(x), plain(x))
    assert all(torch.equal(each, net.state_dict()[name]) for name, each in plain.state_dict().items())


def test_the_files_of_a_checkpoint_are_used_as_they_are(machine: Machine, tmp_path: Path) -> None:
    saved = Net()
    names = list(saved.state_dict())
    for number, some in enumerate((names[:7], names[7:])):
        save_file({name: saved.state_dict()[name] for name in some}, tmp_path / f"model-{number}.safetensors")
    before = sorted(tmp_path.iterdir())
    net = copy.deepcopy(saved)
    with torch.no_grad():
        for parameter in net.blocks.parameters():
            parameter.zero_()  # They are not looked at.
    weights = streamed(machine, net, tmp_path, 0)
    assert_trains_as(net, saved)
    weights.close()
    assert sorted(tmp_path.iterdir()) == before


def test_weights_of_another_precision_are_read_as_those_of_the_module(machine: Machine, tmp_path: Path) -> None:
    net = Net()
    save_file({name: each.bfloat16() for name, each in net.state_dict().items()}, tmp_path / "model.safetensors")
    plain = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in plain.blocks.parameters():
            parameter.copy_(parameter.bfloat16())
    weights = streamed(machine, net, tmp_path, 0)
    x = torch.randn(2, 4)
    assert torch.equal(net(x), plain(x))
    state = net.state_dict()  # As it is in the files.
    assert state["blocks.0.up.weight"].dtype is torch.bfloat16
    assert all(
        torch.equal(state[name].float(), each) for name, each in plain.blocks.state_dict(prefix="blocks.").items()
    )
    weights.close()
    assert torch.equal(net(x), plain(x))
    assert {each.dtype for each in net.parameters()} == {torch.float32}


def test_a_file_that_is_cut_short_after_a_pass_is_an_error_and_no_rubbish(machine: Machine, tmp_path: Path) -> None:
    net = Net()
    weights = streamed(machine, net, tmp_path / "new", 0)
    assert weights.host_bytes == 0
    for path in (tmp_path / "new").iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(ShardwiseError, match="weights could not be read from disk"):
        net(torch.randn(2, 4))


def test_mistakes_are_sentences(machine: Machine, tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(ShardwiseError, match=r"no room on the host: .* KiB of weights .* host_bytes is 1.0 KiB"):
        stream(net, machine, "cpu:0", blocks=list(net.blocks), host_bytes=1024)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "blocks.3.up.weight"
    save_file({**tensors, name: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ShardwiseError, match=rf"{name} is \[2, 2\] in .* and \[32, 16\] in the module"):
        streamed(machine, net, tmp_path, 0)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ShardwiseError, match=rf"lacks 1 of the 32 tensors .*, such as {name}"):
        streamed(machine, net, tmp_path, 0)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ShardwiseError, match=r"model.safetensors cannot be read"):
        streamed(machine, net, tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(ShardwiseError, match=r"cannot be written to .*block-0.safetensors"):
        streamed(machine, net, tmp_path / "file", 0)
