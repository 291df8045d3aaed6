"""A checkpoint in the memory of machines: written there by a thread, sent to a neighbour, and read back.

    training   step | copy | step | step | step ...                 only the copy blocks it (`snapshot.py`)
    writer            `-- own memory -- neighbour's memory --'       a thread of its own on every rank

The files are those of a checkpoint, without the index. A reader assembles the index from the pieces of all ranks,
wherever these are by then.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.copies.keepers import FAILURES, Keeper, find_keeper
from shardwise.copies.memory import Generation, Memory, rank_name
from shardwise.errors import ShardwiseError
from shardwise.training.checkpoint.index import (
    Entry,
    FileOutline,
    Index,
    check_digest,
    read_entries,
    read_files,
    write_json,
)
from shardwise.training.checkpoint.index import told as told_of
from shardwise.training.checkpoint.read import Reader
from shardwise.training.checkpoint.write import Mark, Writer, merge, write_files


class Neighbour(NamedTuple):
    """The machine that holds copies of this one's pieces. The address of its keeper is in the folder of the run."""

    folder: Path
    node: str

    def bring(self, generation: Generation, paths: list[Path]) -> None:
        """Send files, in this order. The keeper is looked up each time, as it may have been restarted."""
        keeper = find_keeper(self.folder, self.node)
        if keeper is None:
            raise OSError(f"nobody keeps copies on {self.node}")
        for path in paths:
            keeper.put(generation, path)


class CopyWriter(Writer):
    """Writes this rank's share of each generation to memory. If only the transfer to the neighbour fails, `apart` has
    the reason, and the copy on this machine is valid."""

    def __init__(
        self, memory: Memory, neighbour: Neighbour | None, *,
        rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], see_to_keeper: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(memory.folder, rank=rank, num_ranks=num_ranks, keep=2, gather=gather)
        self._memory, self._neighbour, self._see_to_keeper = memory, neighbour, see_to_keeper
        self.apart: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    @property
    def num_bytes(self) -> int:
        """The bytes of each generation that this rank writes."""
        return sum(size for entry, box, size in self._described if (entry, box) in self._mine)

    def generation(self, step: int) -> Generation:
        return Generation(step, self._run, self._num_ranks)

    def _write(self, step: int, extra: dict[str, Any]) -> str | None:
        generation, name = self.generation(step), rank_name(self._rank)
        folder = self._memory.path(generation, "")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._snapshot.wait()
            entries, files = write_files(folder, name, self._snapshot.parts, Mark(self._run, step))
            piece = {"run": self._run, "step": step, "files": files, "entries": told_of(entries)}
            if self._rank == 0:
                piece["extra"] = extra
            write_json(folder / f"{name}.json", piece)
        except OSError as error:
            return f"the copy of step {step} cannot be written to {self._memory.folder}: {error.strerror or error}"
        finally:
            self._snapshot.release()
        self.apart, to = None, "its keeper"
        try:
            self._see_to_keeper()
            if self._neighbour is not None:
                to = self._neighbour.node
                self._neighbour.bring(generation, [*(folder / file for file in files), folder / f"{name}.json"])
        except FAILURES as error:
            self.apart = f"the copy of step {step} did not reach {to}: {error}"
        return None


def open_generation(
    generation: Generation, memory: Memory, holders: Mapping[int, list[str]], keepers: Mapping[str, Keeper]
) -> Reader:
    """Return a reader of a generation whose pieces are here or at these nodes. Missing pieces are fetched."""

    def locate(file: str) -> Path:
        path, rank = memory.path(generation, file), int(re.split(r"[-.]", file)[1])
        if not path.exists():
            with memory.alone_with(path):
                if not path.exists():
                    _bring(generation, file, path, [keepers[node] for node in holders[rank] if node in keepers])
        return path

    entries: dict[str, Entry] = {}
    files: dict[str, FileOutline] = {}
    extra: Mapping[str, Any] = {}
    for rank in range(generation.num_ranks):
        content = _read_piece(locate(f"{rank_name(rank)}.json"), generation)
        merge(entries, read_entries(content["entries"]))
        files |= read_files(content["files"])
        extra = content.get("extra", extra)
    index = Index(step=generation.step, entries=entries, extra=extra, files=files, run=generation.run)
    return Reader(memory.path(generation, ""), index, locate)


def _bring(generation: Generation, file: str, path: Path, keepers: list[Keeper]) -> None:
    problem = "nobody has it"
    for keeper in keepers:
        try:
            keeper.get(generation, file, path)
            return
        except FAILURES as error:
            problem = f"{keeper.node}: {error}"
    raise ShardwiseError(f"{file} of the copy of step {generation.step} cannot be read: {problem}")


def _read_piece(path: Path, generation: Generation) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        check_digest(raw)
        content: dict[str, Any] = json.loads(raw)
        if (content["run"], content["step"]) != (generation.run, generation.step):
            raise ValueError("it is of another copy")
        return content
    except (OSError, ValueError, KeyError) as error:
        raise ShardwiseError(f"{path} is damaged: {error}") from None
