"""Copies for a checkpoint on a GPU: made there or on the host, they are of the moment in which they were asked for."""

from pathlib import Path

import pytest
import torch

from shardwise.training.checkpoint import blocks, snapshot
from shardwise.training.checkpoint.blocks import checksum
from shardwise.training.checkpoint.index import Entry, bytes_of
from shardwise.training.checkpoint.parts import whole_part
from shardwise.training.checkpoint.snapshot import Snapshot
from shardwise.training.checkpoint.write import Mark, write_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
#: Blocks end within chunks, and chunks within blocks.
CHUNK_BYTES, BLOCK_BYTES = 1000, 768


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_room", [True, False])
def test_what_is_written_is_what_was_there_however_large(
    device: str, has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    if not has_room:
        monkeypatch.setattr(Snapshot, "_find_room", lambda *_: False)
    given = {
        "large": torch.randn(70, 50, device=device),
        "cut": torch.randn(40, 60, device=device)[:, 3:20],
        "half": torch.randn(33, device=device).bfloat16(),
        "count": torch.tensor(7.0, device=device),
        "none": torch.empty(0, 4, device=device),
    }
    before = {name: each.cpu().clone() for name, each in given.items()}
    taken = Snapshot()
    for _ in range(2):  # The second time in the memory of the first.
        for name, each in given.items():
            each.copy_(before[name])
        taken.take(whole_part(name, each) for name, each in given.items())
        for each in given.values():
            each.add_(1)
        taken.wait()
        entries, _ = write_parts(tmp_path / "parts.safetensors", taken.parts, Mark("4f1c", 7))
        taken.release()
        _check(tmp_path / "parts.safetensors", entries, before)


def _check(path: Path, entries: dict[str, Entry], before: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file

    found = load_file(path)
    assert found.keys() == before.keys()
    for name, each in before.items():
        assert torch.equal(found[name].view(each.shape), each), name
        data = bytes_of(each)
        starts = range(0, len(data), BLOCK_BYTES)
        assert entries[name].boxes[0].checksums == tuple(checksum(data[at : at + BLOCK_BYTES]) for at in starts)
