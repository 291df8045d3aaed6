"""Weights on disk that are trained: the numbers of memory, the user's files as they were, and a disk that fills."""

import copy
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import shardwise as sw
from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.placing import Placed
from shardwise.placing.loads import find_loads, total_bytes
from shardwise.states.tiers import stream
from shardwise.states.tiers.choose_offloaded import choose_for_room
from shardwise.states.tiers.streamed_block import num_bytes_of
from tests.engine.same import assert_same
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

BESIDE = ["cpu:0", "cpu"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


def weight_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters())


def on_disk(folder: Path, moments: int) -> tuple[Net, Placed]:
    """The same net twice: as it is; and placed with too little room on the device, and on the host."""
    net = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(net)
    needed = (2 + moments) * weight_bytes(net)
    budget = {"cpu:0": int(0.8 * needed), "cpu": int(0.25 * needed)}
    placed = sw.place(net, BESIDE, budget=budget, host="stream", folder=folder, moments=moments)
    return plain, placed


def streamed_of(placed: Placed) -> Any:
    assert placed._arranged.host is not None
    assert placed._arranged.host._streamed is not None
    return placed._arranged.host._streamed


OPTIMIZERS: dict[str, tuple[int, Callable[[Any], Optimizer]]] = {
    "sgd": (0, lambda some: SGD(some, lr=0.05)),
    "momentum": (1, lambda some: SGD(some, lr=0.05, momentum=0.9)),
    "adamw": (2, lambda some: AdamW(some, lr=0.01)),
    "fused": (2, lambda some: AdamW(some, lr=0.01, fused=True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_users_optimizer_trains_what_is_on_disk_bit_for_bit(name: str, tmp_path: Path) -> None:
    moments, make = OPTIMIZERS[name]
    checkpoint = tmp_path / "model.safetensors"
    save_file({each: value.contiguous() for each, value in Net(num_blocks=12).state_dict().items()}, checkpoint)
    before = checkpoint.read_bytes(), checkpoint.stat().st_mtime_ns
    plain, placed = on_disk(tmp_path, moments)
    weights = streamed_of(placed)
    assert weights.disk_bytes > 0
    for net in (plain, placed):
        optimizer = make(net.parameters())
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):  # Gradients of two backwards are added up.
                net(ids(2 * step + part)).square().mean().backward()
            clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            with torch.no_grad():
                net.eval()(ids(100 + step))
                net.train()
    assert_same(plain, placed)
    assert all(torch.equal(placed.state_dict()[name], each) for name, each in plain.state_dict().items())
    # The user's file is as it was, and ours have no names: nothing is left of them.
    assert (checkpoint.read_bytes(), checkpoint.stat().st_mtime_ns) == before
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_what_is_written_comes_from_the_disk_again(tmp_path: Path) -> None:
    """Weights are written back, their pages given up, and the next forward reads the file."""
    plain, placed = on_disk(tmp_path, 0)
    for net in (plain, placed):
        net(ids()).square().mean().backward()
        SGD(net.parameters(), lr=0.1).step()
    blocks = [block for block in streamed_of(placed)._blocks if block.scratch is not None]
    assert blocks
    for block in blocks:
        memory, file = block.scratch.weights, block.scratch.file
        assert os.pread(file, memory.numel(), 0) == bytes(memory.numpy())
        give_up(memory)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    stay = any(is_resident(block.scratch.weights) for block in blocks)
    with torch.no_grad():
        assert torch.equal(placed(ids(1)), plain(ids(1)))
    assert_same(plain, placed)
    if stay:
        pytest.skip("this file system keeps its pages in memory")


def give_up(memory: Tensor) -> None:
    """Write mapped memory back, and unmap its pages: the next look at them goes to the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    start, length = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    assert libc.msync(start, length, 4) == 0  # MS_SYNC
    assert libc.madvise(start, length, mmap.MADV_DONTNEED) == 0


def is_resident(memory: Tensor) -> bool:
    """Whether the kernel has any page of it in its memory."""
    pages = -(-memory.numel() // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), found) == 0
    return any(each & 1 for each in found)


def test_weights_that_the_user_changes_or_loads_are_used(tmp_path: Path) -> None:
    plain, placed = on_disk(tmp_path, 0)
    for net in (plain, placed):
        with torch.no_grad():
            net(ids())
            for each in net.parameters():
                each.mul_(1.5)
        net(ids(1)).sum().backward()
    assert_same(plain, placed)
    other = Net(num_blocks=12, width=24)
    save_file({name: each.clone() for name, each in other.state_dict().items()}, tmp_path / "new.safetensors")
    placed.load_state_dict(load_file(tmp_path / "new.safetensors"))
    with torch.no_grad():
        assert torch.equal(placed(ids()), other(ids()))
        for each in [*placed.parameters(), *other.parameters()]:
            each.data = each.data * 2
        assert torch.equal(placed(ids()), other(ids()))


def test_activations_leave_beside_weights_on_disk(tmp_path: Path) -> None:
    example = {"ids": ids()}
    plain = Net(num_blocks=12, width=24)
    needed = total_bytes(find_loads(plain, example, moments=0).calls, 1)
    budget = {"cpu:0": int(0.4 * needed), "cpu": int(0.56 * needed)}
    placed = sw.place(
        Net(num_blocks=12, width=24), BESIDE, budget=budget, host="stream", folder=tmp_path, moments=0, example=example
    )
    for net in (plain, placed):
        net(ids()).square().mean().backward()
    assert_same(plain, placed)
    assert streamed_of(placed).disk_bytes > 0
    assert " a step if streamed, partly from disk, with 100 % of the activations on the host" in placed.reason
    assert placed.activations is not None
    assert placed.activations.sent_bytes > 0


def test_streaming_by_hand_and_leaving_it(tmp_path: Path) -> None:
    net = Net(num_blocks=6, width=24)
    plain, blocks = copy.deepcopy(net), list(net.blocks)
    size = num_bytes_of(list(blocks[0].parameters()))
    with Machine(["cpu:0"]) as machine:
        weights = stream(net, machine, "cpu:0", blocks=blocks, host_bytes=2 * size, scratch=tmp_path)
        assert weights is not None
        assert (weights.host_bytes, weights.disk_bytes) == (2 * size, 4 * size)
        for each in (plain, net):
            optimizer = AdamW(each.parameters(), lr=0.01)
            for step in range(3):
                optimizer.zero_grad()
                each(ids(step)).square().mean().backward()
                optimizer.step()
        assert_same(plain, net)
        weights.close()
    assert torch.equal(net(ids()), plain(ids()))


def test_a_disk_that_fills_says_so_before_anything_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, calls = os.posix_fallocate, []

    def fill(file: int, start: int, length: int) -> None:
        calls.append(length)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, length)

    monkeypatch.setattr(os, "posix_fallocate", fill)
    net = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(net)
    places = {name: each.data_ptr() for name, each in net.named_parameters()}
    needed = 2 * weight_bytes(net)
    budget = {"cpu:0": int(0.8 * needed), "cpu": int(0.2 * needed)}
    with pytest.raises(
        ShardwiseError, match=r"8.0 KiB for weights that are trained cannot be reserved in .*: No space left"
    ):
        sw.place(net, BESIDE, budget=budget, host="stream", folder=tmp_path, moments=0)
    assert not list(tmp_path.iterdir())
    assert {name: each.data_ptr() for name, each in net.named_parameters()} == places
    assert torch.equal(net(ids()), plain(ids()))
    (tmp_path / "taken").touch()
    with pytest.raises(ShardwiseError, match=r"cannot be reserved in .*taken: (File exists|Not a directory)"):
        sw.place(net, BESIDE, budget=budget, host="stream", folder=tmp_path / "taken", moments=0)


def test_what_an_optimizer_keeps_is_in_memory_and_refused_there(tmp_path: Path) -> None:
    net = Net(num_blocks=12, width=24)
    budget = {"cpu:0": int(0.8 * 4 * weight_bytes(net)), "cpu": 1000}
    with pytest.raises(ShardwiseError, match=r"no room on the host: .* only 1000 B are available"):
        sw.place(net, BESIDE, budget=budget, host="stream", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_fewest_go_and_something_of_them_stays() -> None:
    assert choose_for_room([4, 4, 4, 4], [0, 0, 0, 0], 16) == []
    assert choose_for_room([4, 4, 4, 4], [0, 0, 0, 0], 8) == [1, 3]
    assert choose_for_room([4, 4, 4, 4], [2, 2, 2, 2], 12) == [1, 3]
    assert choose_for_room([4, 4, 4, 4], [2, 2, 2, 2], 7) is None
