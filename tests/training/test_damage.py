"""A damaged checkpoint is never read, whole or in part. `benchmarks/damages.py` does 2,000 damages; here are some of
each kind, to a checkpoint of two ranks whose boxes have several blocks."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from threading import Barrier, Event
from typing import Any

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.testing.damages import KINDS, DamagedFolder
from shardwise.training.checkpoint.blocks import BLOCK_BYTES, Checksums, checksum, touched
from shardwise.training.checkpoint.boxes import Box, whole_box
from shardwise.training.checkpoint.index import INDEX, OLD_FORMAT, Index, read_index, saved_steps, write_index
from shardwise.training.checkpoint.parts import Part, whole_part
from shardwise.training.checkpoint.read import Reader
from shardwise.training.checkpoint.write import Mark, Writer, write_files

SHAPE = (640, 1000)


def parts_of(rank: int, value: float) -> list[Part]:
    """Of two ranks: rows of a matrix, and something of its own."""
    half = SHAPE[0] // 2
    numbers = torch.arange(half * SHAPE[1], dtype=torch.float32).view(half, SHAPE[1]) + value + rank
    return [
        Part("weight", SHAPE, Box((rank * half, 0), (half, SHAPE[1])), numbers),
        whole_part(f"random/cpu/{rank}", torch.arange(200, dtype=torch.uint8) + int(value)),
        *([whole_part("optimizer/step/weight", torch.tensor(value))] if rank else []),
    ]


class Meeting:
    """Two ranks of a run, as threads."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(2), list[Any]([None, None])

    def gather(self, rank: int, given: Any) -> list[Any]:
        self._given[rank] = given
        self._barrier.wait()
        told = list(self._given)
        self._barrier.wait()
        return told


def save(root: Path, meeting: Meeting, rank: int, value: float, steps: Sequence[int]) -> list[str | None]:
    """What a rank of a run does, at some steps. Returns what went wrong."""
    writer = Writer(root, rank=rank, num_ranks=2, keep=9, gather=partial(meeting.gather, rank))
    problems = [writer.save(step, parts_of(rank, value + step), {"note": value + step}) for step in steps]
    problems.append(writer.finish())
    writer.close()
    return problems


def test_a_run_that_fails_completes_what_another_rank_has_yet_to_write(tmp_path: Path) -> None:
    meeting, fails = Meeting(), Event()

    def fail(rank: int) -> None:
        writer = Writer(tmp_path, rank=rank, num_ranks=2, keep=9, gather=partial(meeting.gather, rank))
        if rank == 1:  # It comes to write its part when the first has failed.
            writer._snapshot.wait = fails.wait  # type: ignore[method-assign, assignment]
        writer.save(1, parts_of(rank, 1.0), {})
        fails.set()
        writer.close(has_failed=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fail, range(2)))
    assert saved_steps(tmp_path) == [1]


def read_in_part(folder: Path) -> None:
    """As the two ranks of another plan read: columns, and their own random numbers."""
    with Reader(folder) as reader:
        for rank in range(2):
            width = SHAPE[1] // 2
            numbers = torch.empty(SHAPE[0], width)
            reader.fill(Part("weight", SHAPE, Box((0, rank * width), (SHAPE[0], width)), numbers))
            step = float(reader.whole("optimizer/step/weight"))
            expected = torch.cat([parts_of(each, step)[0].numbers for each in range(2)])
            assert torch.equal(numbers, expected[:, rank * width : (rank + 1) * width])
        reader.verify("random/")


def read_whole(folder: Path) -> None:
    with Reader(folder) as reader:
        reader.verify()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    meeting = Meeting()
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda rank: save(folder, meeting, rank, 0, (1, 2)), range(2)))
    assert told == [[None] * 3] * 2
    return folder


def test_what_is_whole_is_read(root: Path) -> None:
    assert saved_steps(root) == [1, 2]
    for read in (read_in_part, read_whole):
        read(root / "step-00000002")
    index = read_index(root / "step-00000002")
    assert [len(each.checksums) for each in index.entries["weight"].boxes] == [2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_unseen(kind: str, root: Path) -> None:
    folder = root / "step-00000002"
    damaged, chance = DamagedFolder(folder, root / "step-00000001"), Random(kind)
    for _ in range(3):
        damaged.damage(kind, chance)
        try:
            for read in (read_in_part, read_whole):
                with pytest.raises(ShardwiseError) as caught:
                    read(folder)
                assert caught.value.remedy is not None
        finally:
            damaged.restore()
    read_in_part(folder)


def test_a_part_is_read_although_another_block_is_damaged_and_says_which_bytes(root: Path) -> None:
    folder = root / "step-00000002"
    path = folder / "rank-00000.safetensors"
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    at = start + BLOCK_BYTES + 5  # In the second block of the first rank's rows.
    try:
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with Reader(folder) as reader:
            row = torch.empty(1, SHAPE[1])
            reader.fill(Part("weight", SHAPE, Box((0, 0), (1, SHAPE[1])), row))
            with pytest.raises(ShardwiseError) as caught:
                reader.fill(Part("weight", SHAPE, Box((319, 0), (1, SHAPE[1])), row))
        end = start + 320 * SHAPE[1] * 4
        assert caught.value.problem == (
            f"weight in {path} is damaged between the bytes {start + BLOCK_BYTES} and {end}: their checksum is not the"
            " one that was written"
        )
        assert reader.bytes_compared == BLOCK_BYTES
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    "chunk_bytes", [BLOCK_BYTES // 3, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 7]
)
@pytest.mark.parametrize("num_bytes", [0, 5, BLOCK_BYTES, 3 * BLOCK_BYTES + 1])
def test_checksums_are_of_blocks_however_the_bytes_come(num_bytes: int, chunk_bytes: int) -> None:
    data = Random(num_bytes).randbytes(num_bytes)
    found, pieces = Checksums(), list[bytes]()
    for start in range(0, num_bytes, chunk_bytes):
        pieces += found.count_in(data[start : start + chunk_bytes])
    assert b"".join(pieces) == data
    assert found.numbers == [checksum(data[at : at + BLOCK_BYTES]) for at in range(0, num_bytes, BLOCK_BYTES)]


@pytest.mark.parametrize("shape", [(7,), (), (5, 3), (3, 5, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize("block_bytes", [4, 12, 20, 64, 10_000])
def test_the_blocks_of_a_part_are_those_that_its_numbers_lie_in(shape: tuple[int, ...], block_bytes: int) -> None:
    whole = whole_box(shape)
    offsets = torch.arange(whole.num_numbers).view(shape) * 4
    chance = Random(0)
    for _ in range(30):
        starts = tuple(chance.randrange(size) for size in shape)
        part = Box(starts, tuple(chance.randint(1, size - at) for size, at in zip(shape, starts, strict=True)))
        lies_in = {int(each) // block_bytes for each in offsets[part.within(whole)].flatten()}
        lies_in |= {(int(each) + 3) // block_bytes for each in offsets[part.within(whole)].flatten()}
        found = {block for run in touched(part, whole, 4, block_bytes) for block in run}
        assert lies_in <= found
        assert found <= set(range(min(lies_in), max(lies_in) + 1))


def make_old(folder: Path, target: Path) -> Path:
    """The same checkpoint as Shardwise wrote it before there were blocks."""
    target.mkdir(parents=True)
    entries: dict[str, object] = {}
    with Reader(folder) as reader:
        for name, entry in reader.index.entries.items():
            sums = [checksum(reader._read(entry, each, each.box).numpy().tobytes()) for each in entry.boxes]
            boxes = [[s.file, s.key, s.box.start, s.box.size, crc] for s, crc in zip(entry.boxes, sums, strict=True)]
            entries[name] = {"shape": entry.shape, "dtype": entry.dtype, "boxes": boxes}
    for path in folder.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
    (target / INDEX).write_text(json.dumps({"format": OLD_FORMAT, "step": 2, "extra": {}, "entries": entries}))
    return target


def test_old_checkpoints_are_read_and_a_part_of_a_damaged_box_is_not(root: Path, tmp_path: Path) -> None:
    old = make_old(root / "step-00000002", tmp_path / "step-00000002")
    assert read_index(old).is_old
    assert not read_index(root / "step-00000002").is_old
    for read in (read_in_part, read_whole):
        read(old)
    path = old / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-300] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardwiseError, match=r"in .*rank-00001\.safetensors is damaged between the bytes"):
        read_in_part(old)
    # One of today that says it is old is not believed.
    new = (root / "step-00000002" / INDEX).read_text().replace("checkpoint 2", "checkpoint 1")
    (old / INDEX).write_text(new)
    with pytest.raises(ShardwiseError, match=r"index\.json is damaged: it has other keys"):
        read_index(old)


def test_two_runs_in_one_folder_never_make_one_checkpoint(tmp_path: Path) -> None:
    """Without the lock that keeps them apart: all ranks of both save the same steps at the same time."""
    meetings = [Meeting(), Meeting()]
    steps = range(1, 9)
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda n: save(tmp_path, meetings[n // 2], n % 2, 100.0 * (n // 2), steps), range(4)))
    assert told == [[None] * 9] * 4
    assert saved_steps(tmp_path) == list(steps)
    for step in steps:
        with Reader(tmp_path / f"step-{step:08}") as reader:
            reader.verify()
            value = reader.index.extra["note"]
            assert value in (step, 100.0 + step)
            expected = torch.cat([parts_of(rank, value)[0].numbers for rank in range(2)])
            assert torch.equal(reader.whole("weight"), expected)
            assert float(reader.whole("optimizer/step/weight")) == value


def test_files_of_two_runs_put_together_are_refused(tmp_path: Path) -> None:
    """The very same numbers, written by two runs: nothing but the mark is another's."""
    folders = []
    for run in "ab":
        folder = tmp_path / run
        folder.mkdir()
        entries, files = write_files(folder, "rank-00000", [whole_part("weight", torch.arange(9.0))], Mark(run, 7))
        write_index(folder, Index(step=7, entries=entries, files=files, run=run))
        read_whole(folder)
        folders.append(folder)
    shutil.copyfile(folders[0] / "rank-00000.safetensors", folders[1] / "rank-00000.safetensors")
    with pytest.raises(ShardwiseError, match="its header is not the one that was written"):
        read_whole(folders[1])
