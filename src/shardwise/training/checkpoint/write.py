"""Asynchronous checkpoints, written while training continues.

    training   step | copy | step | step | step ...         only the copy blocks it (`snapshot.py`)
    writer            `---- file, checksums, rename ----'    a thread of its own on every rank

All ranks exchange descriptions of their parts once. A part that several ranks hold is assigned to one of them to write.
A rank that has written its data also writes a small JSON file. The first rank's writer waits for these of all ranks,
writes the index, and renames the folder to its final name. So a kill at any moment leaves the last complete checkpoint,
and the ranks need only a common folder. Everything written carries the mark of the run, a random word that its first
rank draws. So files that another run has left, or is writing there, are never mistaken for parts of this checkpoint.
"""

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.training.checkpoint.blocks import Checksums, checksum
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.file import TYPES, header_of
from shardwise.training.checkpoint.index import (
    SAVING,
    Entry,
    FileOutline,
    Index,
    Stored,
    check_digest,
    folder_of,
    prune,
    read_entries,
    read_files,
    told,
    write_index,
    write_json,
)
from shardwise.training.checkpoint.parts import Part
from shardwise.training.checkpoint.snapshot import Chunks, Snapshot

_POLL_SECONDS, _ASK_SECONDS = 0.01, 0.1
# A rank whose disk does not accept even an empty file cannot report its failure. It is given up after this long.
_PATIENCE_SECONDS = 600.0
# Once the run has failed, ranks are given up after this long without writes: killed ranks write no more.
_QUIET_SECONDS = 1.0

#: A part, as ranks describe it to each other: entry, box, number of bytes.
Description = tuple[str, Box, int]


def share_out(described: Sequence[Sequence[Description]]) -> list[set[tuple[str, Box]]]:
    """Assign each part to one rank to write: the holder with the fewest bytes so far. Return the parts by rank."""
    holders: dict[tuple[str, Box], list[int]] = {}
    sizes: dict[tuple[str, Box], int] = {}
    for rank, parts in enumerate(described):
        for entry, box, num_bytes in parts:
            holders.setdefault((entry, box), []).append(rank)
            sizes[entry, box] = num_bytes
    load = [0] * len(described)
    chosen: list[set[tuple[str, Box]]] = [set() for _ in described]
    # Parts with a single holder come first: they leave no choice.
    for part in sorted(holders, key=lambda part: (len(holders[part]), -sizes[part], part)):
        rank = min(holders[part], key=load.__getitem__)
        chosen[rank].add(part)
        load[rank] += sizes[part]
    return chosen


class Writer:
    """Writes this rank's share of checkpoints, one at a time, in a thread of its own.

    `gather(value)` returns the values of all ranks. All ranks call it.
    """

    def __init__(self, root: Path, *, rank: int, num_ranks: int, keep: int, gather: Callable[[Any], list[Any]]) -> None:
        self._root, self._rank, self._num_ranks, self._keep, self._gather = root, rank, num_ranks, keep, gather
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoint")
        self._snapshot = Snapshot()  # Of the parts that this rank writes.
        self._under_way: Future[str | None] | None = None
        self._has_failed = threading.Event()
        self._described: list[Description] = []
        self._mine: set[tuple[str, Box]] = set()
        #: How long the thread took for the last checkpoint.
        self.seconds = 0.0
        self._run: str = gather(secrets.token_hex(8))[0]

    def save(self, step: int, parts: Sequence[Part], extra: Mapping[str, Any]) -> str | None:
        """Begin to save. Return the problem with the previous checkpoint, of any rank. Every rank calls this."""
        problem = self.finish()
        self.agree(parts)
        self._snapshot.take(part for part in parts if (part.entry, part.box) in self._mine)
        self._under_way = self._thread.submit(self._timed_write, step, dict(extra))
        return problem

    def finish(self) -> str | None:
        """Wait for the checkpoint being written. Return its problem, of any rank, or None. Every rank calls this."""
        if self._under_way is None:
            return None
        # Ranks gather repeatedly while they wait: only this detects a rank that is gone.
        told: list[tuple[bool, str | None]] = [(False, None)]
        while not all(is_done for is_done, _ in told):
            is_done = bool(wait([self._under_way], _ASK_SECONDS).done)
            told = self._gather((is_done, self._under_way.result() if is_done else None))
        self._under_way = None
        return next((problem for _, problem in told if problem is not None), None)

    def close(self, *, has_failed: bool = False) -> None:
        """Stop the thread after it has finished writing. If the run has failed, parts of lost ranks will never come, so
        the thread waits only as long as ranks still write."""
        if has_failed:
            self._has_failed.set()
        self._thread.shutdown()

    def agree(self, parts: Sequence[Part]) -> None:
        """Decide which rank writes which part. This is repeated only if a rank's parts have changed."""
        described: list[Description] = [(part.entry, part.box, part.numbers.nbytes) for part in parts]
        if any(self._gather(described != self._described)):
            self._described = described
            self._mine = share_out(self._gather(described))[self._rank]

    def _timed_write(self, step: int, extra: dict[str, Any]) -> str | None:
        begun = time.perf_counter()
        try:
            return self._write(step, extra)
        finally:
            self.seconds = time.perf_counter() - begun

    def _write(self, step: int, extra: dict[str, Any]) -> str | None:
        final = folder_of(self._root, step)
        folder, name = final.with_name(f"{final.name}.{self._run}{SAVING}"), f"rank-{self._rank:05}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._snapshot.wait()
            entries, files = write_files(folder, name, self._snapshot.parts, Mark(self._run, step))
            mine = {"run": self._run, "step": step, "files": files, "entries": told(entries)}
            write_json(folder / f"{name}.json", mine)
        except OSError as error:
            problem = f"the checkpoint of step {step} cannot be written to {self._root}: {error.strerror or error}"
            _give_up(folder, self._rank, problem)
            return problem
        finally:
            self._snapshot.release()
        return self._complete(step, folder, final, extra) if self._rank == 0 else None

    def _complete(self, step: int, folder: Path, final: Path, extra: dict[str, Any]) -> str | None:
        """Wait for the other ranks, write the index, and rename the folder to its final name."""
        names = [f"rank-{rank:05}" for rank in range(self._num_ranks)]
        patience = _Patience(folder)
        while not all((folder / f"{name}.json").exists() for name in names):
            failed = next(iter(sorted(folder.glob("*.failed"))), None)
            if failed is not None or patience.is_over(run_has_failed=self._has_failed.is_set()):
                said = "" if failed is None else failed.read_text(encoding="utf-8")
                problem = said or f"the checkpoint of step {step} failed: not every rank could write its part"
                shutil.rmtree(folder, ignore_errors=True)
                return problem
            time.sleep(_POLL_SECONDS)
        try:
            entries, files = self._collect(step, [folder / f"{name}.json" for name in names])
            write_index(folder, Index(step=step, entries=entries, extra=extra, files=files, run=self._run))
            if not _give_name(folder, final):
                return None
            _sync_folder(self._root)
            prune(self._root, self._keep)
        except (OSError, ValueError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            return f"the checkpoint of step {step} cannot be completed in {self._root}: {why}"
        return None

    def _collect(self, step: int, paths: Iterable[Path]) -> tuple[dict[str, Entry], dict[str, FileOutline]]:
        """Return the entries and files of all ranks. Raise a `ValueError` for a part of another run or step."""
        entries: dict[str, Entry] = {}
        files: dict[str, FileOutline] = {}
        for path in paths:
            raw = path.read_bytes()
            check_digest(raw)
            content = json.loads(raw)
            if (content["run"], content["step"]) != (self._run, step):
                raise ValueError(f"{path.name} is of the run {content['run']} and its step {content['step']}")
            merge(entries, read_entries(content["entries"]))
            files |= read_files(content["files"])
            path.unlink()
        return entries, files


class _Patience:
    """How long to wait for other ranks, depending on what they write to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._deadline = folder, time.monotonic() + _PATIENCE_SECONDS
        self._seen: set[tuple[str, int]] | None = None
        self._quiet_since = 0.0

    def is_over(self, *, run_has_failed: bool) -> bool:
        now = time.monotonic()
        if not run_has_failed:
            return now > self._deadline
        with contextlib.suppress(FileNotFoundError):  # A file was renamed meanwhile, which is a sign of writing too.
            found = {(path.name, path.stat().st_size) for path in self._folder.iterdir()}
            if found != self._seen:
                self._seen, self._quiet_since = found, now
        return now - self._quiet_since > _QUIET_SECONDS


class Mark(NamedTuple):
    """The run and the step of a file, stored in its header."""

    run: str
    step: int


def write_files(
    folder: Path, name: str, parts: Sequence[Part], mark: Mark
) -> tuple[dict[str, Entry], dict[str, FileOutline]]:
    """Write parts to `name.safetensors`. The second box of an entry goes to `name-2.safetensors`, and so on. So each
    file stores a box under its tensor's own name, where `torch.distributed.checkpoint` finds it too."""
    groups: list[list[Part]] = []
    seen: dict[str, int] = {}
    for part in parts:
        number = seen[part.entry] = seen.get(part.entry, -1) + 1
        groups += [[]] if number == len(groups) else []
        groups[number].append(part)
    entries: dict[str, Entry] = {}
    files: dict[str, FileOutline] = {}
    for number, some in enumerate(groups or [[]], start=1):
        path = folder / (f"{name}.safetensors" if number == 1 else f"{name}-{number}.safetensors")
        written, files[path.name] = write_parts(path, some, mark)
        merge(entries, written)
    return entries, files


def write_parts(path: Path, parts: Sequence[Part], mark: Mark) -> tuple[dict[str, Entry], FileOutline]:
    """Write a safetensors file, reading each tensor once. Return its entries and its outline for the index."""
    header = header_of(_described(parts, mark))
    entries: dict[str, Entry] = {}
    chunks = Chunks()
    with path.open("wb") as file:
        file.write(header)
        for part in parts:
            checksums = Checksums()
            for chunk in chunks.of(part.numbers):
                for piece in checksums.count_in(chunk):
                    file.write(piece)
            stored = Stored(file=path.name, key=part.entry, box=part.box, checksums=tuple(checksums.numbers))
            dtype = str(part.numbers.dtype).removeprefix("torch.")
            entries[part.entry] = Entry(shape=part.shape, dtype=dtype, boxes=(stored,))
        file.flush()
        os.fsync(file.fileno())
        return entries, FileOutline(file.tell(), checksum(header))


def _described(parts: Sequence[Part], mark: Mark) -> dict[str, Any]:
    """Return the safetensors header: the description of each tensor, and metadata of the file."""
    # `HuggingFaceStorageReader` of torch.distributed.checkpoint reads the offset of a box in its tensor from here.
    offsets = {part.entry: {"saved_offsets": part.box.start} for part in parts}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    header: dict[str, Any] = {"__metadata__": {**metadata, "run": mark.run, "step": str(mark.step)}}
    at = 0
    for part in parts:
        assert part.entry not in header, f"two boxes of {part.entry} in one file"
        num_bytes = part.numbers.nbytes
        header[part.entry] = {
            "dtype": TYPES[part.numbers.dtype],
            "shape": list(part.box.size),
            "data_offsets": [at, at + num_bytes],
        }
        at += num_bytes
    return header


def merge(entries: dict[str, Entry], more: Mapping[str, Entry]) -> None:
    """Add the boxes of `more` to `entries`."""
    for name, entry in more.items():
        before = entries.get(name)
        boxes = entry.boxes if before is None else (*before.boxes, *entry.boxes)
        entries[name] = Entry(shape=entry.shape, dtype=entry.dtype, boxes=boxes)


def _give_up(folder: Path, rank: int, problem: str) -> None:
    """Free disk space, and report the failure to the first rank. A full disk may still accept an empty file."""
    failed = folder / f"rank-{rank:05}.failed"
    with contextlib.suppress(OSError):
        for path in folder.glob(f"rank-{rank:05}*.safetensors"):
            path.unlink(missing_ok=True)
        failed.touch()
        failed.write_text(problem, encoding="utf-8")
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _give_name(folder: Path, final: Path) -> bool:
    """Rename a folder unless `final` exists: if a restarted run saves a step again, the first checkpoint is as good."""
    if not final.exists():
        with contextlib.suppress(FileExistsError):
            try:
                folder.rename(final)
                return True
            except OSError:  # Systems differ in the error for a target folder that is not empty.
                if not final.exists():
                    raise
    shutil.rmtree(folder)
    return False


def _sync_folder(folder: Path) -> None:
    """Make a rename durable across a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
