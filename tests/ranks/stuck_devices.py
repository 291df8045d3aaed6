"""Ranks whose device never comes to what it was asked for: what NCCL's kernels do when another rank does not come."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.device_progress import DeviceProgress
from shardwise.ranks.faults import Watch
from shardwise.ranks.message_layout import Key, Layout, describe
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.transport import ProcessTransport


class StuckDevice(DeviceProgress):
    """It passes what is marked, until it is stuck."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_stuck = False

    def mark(self, place: object) -> None:
        before = int(self._written[0])
        super().mark(place)
        if self.is_stuck:
            self._written[0] = before

    def _ask(self, number: int) -> None:
        if not self.is_stuck:
            super()._ask(number)


def watch_with(device: StuckDevice, limit_seconds: float) -> Watch:
    watch = Watch(dist.get_rank(), dist.get_world_size(), limit_seconds=limit_seconds, beat_seconds=0.1)
    watch._lookout.gpu = device
    return watch


class HeldUp(ProcessTransport):
    """Its host is held up when it asks for a message, until it is told why: what CUDA may do."""

    def _receive(self, tensor: Tensor, key: Key, tag: int) -> Any:  # noqa: ARG002
        assert self._watch is not None
        while True:
            time.sleep(0.05)
            self._watch.check()


def ask_for_a_message(limit_seconds: float, folder: Path) -> str:
    """Rank 0 is held up when it asks for what rank 1 has not sent, whose host stays where it is."""
    watch = watch_with(StuckDevice(), limit_seconds)
    group = dist.new_group(backend="gloo")
    transport = HeldUp((group, group), watch=watch, links={(0, 1): group, (1, 0): group})
    if dist.get_rank() == 1:
        watch.at("a place of its own")
        while not (folder / "told").exists():
            time.sleep(0.05)
        watch.close()
        return ""
    key = Key(1, 0, "F", 0, 1, 2)
    transport._layouts = {key: Layout(describe([torch.zeros(3)]))}
    watch.at("1RECV_F2<0")
    try:
        transport.post_receive(key)
    except RankError as error:
        (folder / "told").touch()
        watch.close()
        return str(error)
    return "it was not held up"


def wait_for_the_device(limit_seconds: float, comes_back: bool, folder: Path, has_marked_more: bool = True) -> str:
    """Rank 0's device waits for rank 1, whose host stays where it is. What rank 0 is told, if its host comes back.

    Its host has come to another place since, or is in a module's own code, which waits for the device.
    """
    device = StuckDevice()
    watch = watch_with(device, limit_seconds)
    for number in range(3):
        watch.at(f"F{number}")
    if dist.get_rank() == 1:
        watch.at("a place of its own")
        while not (folder / "told").exists():
            time.sleep(0.05)
        watch.close()
        return ""
    device.is_stuck = True
    if has_marked_more:
        watch.at("B0")
    if not comes_back:
        time.sleep(600)
    while True:
        time.sleep(0.05)
        try:
            watch.check()
        except RankError as error:
            (folder / "told").touch()
            watch.close()
            return str(error)
