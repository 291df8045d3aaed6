"""Copies beside the steps of a GPU: whatever is late, every step reads the bytes that names say."""

import random
from collections.abc import Sequence
from pathlib import Path

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
