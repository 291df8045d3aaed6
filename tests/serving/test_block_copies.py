"""Copies beside the steps of a GPU: whatever is late, every step reads the bytes that names say."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.serving.block_copies import BlockCopies
from shardwise.serving.blocks import BlockPool, first_name, next_name
from shardwise.serving.file_tier import FileTier
from shardwise.serving.tier_store import HostTier, TierStore
from shardwise.serving.tiers import Tiers
from tests.serving.late_device import LateDevice


def bytes_of(name: bytes) -> Tensor:
    return torch.frombuffer(bytearray(name), dtype=torch.uint8)


@pytest.mark.parametrize(("num_host", "has_files"), [(6, False), (0, True), (5, True)])
@pytest.mark.parametrize(("seed", "num_steps"), [(0, 400), pytest.param(1, 20_000, marks=pytest.mark.whole)])
def test_steps_of_a_late_device_read_what_names_say(
    num_host: int, has_files: bool, seed: int, num_steps: int, tmp_path: Path
) -> None:
    device, dice, pool = LateDevice(seed), random.Random(seed), BlockPool(8, 2)
    data = torch.zeros(8, 16, dtype=torch.uint8)
    files = FileTier(tmp_path, 12 * 32, 16) if has_files else None
    store = TierStore(
        data, HostTier(num_host * 16, 16, num_leaving=3 * has_files), files,
        copies=BlockCopies(data, cuda=device, copy=device.copy),
    )  # fmt: skip
    tiers = Tiers(store, pool, measured=False, num_ahead=4)
    seen: list[bool] = []

    def step(mine: Sequence[tuple[int, bytes]], num_new: int) -> None:
        """Write the new ones, and read all."""
        for block, name in mine[len(mine) - num_new :]:
            data[block] = bytes_of(name)
        seen.append(all(torch.equal(data[block], bytes_of(name)) for block, name in mine))

    held: list[list[int]] = []
    for _ in range(num_steps):
        while held and (len(held) == 2 or dice.random() < 0.5):
            pool.release(held.pop(dice.randrange(len(held))))
        chain, name = [], first_name("m", "")
        for _ in range(dice.randint(1, 4)):
            name = next_name(name, [dice.randint(0, 2)])
            chain.append(name)
        blocks = pool.find(chain)
        for block in blocks:
            pool.take(block)
        blocks += tiers.reload(chain[len(blocks) :])
        num_new = len(chain) - len(blocks)
        blocks += [pool.allocate() for _ in range(num_new)]
        for block, name in zip(blocks[len(chain) - num_new :], chain[len(chain) - num_new :], strict=True):
            pool.fill(block, name)
        held.append(blocks)
        tiers.fence()
        mine = list(zip(blocks, chain, strict=True))
        device.begin(lambda mine=mine, num_new=num_new: step(mine, num_new))  # type: ignore[misc]
        tiers.write_ahead(num_new)
        device.work(dice.randint(0, 6))
    store.settle()
    device.streams[0].synchronize()
    store.close()
    assert len(seen) == num_steps
    assert all(seen)
    assert tiers.loaded_bytes > 16 * num_steps / 10


def test_blocks_that_go_on_to_files_and_come_from_there_are_copied_in_lots(tmp_path: Path) -> None:
    """To begin a copy takes a host longer than a link takes for a block: twelve blocks have one event, not twelve."""
    device, data = LateDevice(0), torch.arange(16 * 16, dtype=torch.uint8).view(16, 16)
    lots: list[int] = []

    class Counted(BlockCopies):
        def _run(self, stream: Any, pairs: Any) -> Any:
            pairs = list(pairs)
            lots.append(len(pairs))
            return super()._run(stream, pairs)

    files = FileTier(tmp_path, 12 * 32, 16)
    store = TierStore(
        data, HostTier(4 * 16, 16, num_leaving=8), files, copies=Counted(data, cuda=device, copy=device.copy)
    )
    names = [f"{block:016}".encode() for block in range(12)]
    for block, name in enumerate(names):
        assert store.put(block, name)
    store.begin()
    assert lots == [12]
    files.settle()
    assert store.tiers_of(names) == 8 * ["files"] + 4 * ["host"]
    wanted, before = data[:12].clone(), data[:12]
    store.settle()
    before.zero_()
    store.prefetch(names)
    for reading, _ in files._reading.values():
        reading.result()
    assert store.bring(list(zip(names, range(12), strict=True))) == 12
    assert lots == [12, 12]
    store.fence()
    store.settle()
    assert torch.equal(data[:12], wanted)
    assert store.host.places.num_free == 8
    assert files.places.num_free == len(files.places)
    store.close()
