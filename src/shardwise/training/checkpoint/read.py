"""Reading a checkpoint under any plan. Each rank reads only the overlaps of stored boxes with the parts it holds."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, some
from shardwise.states.compact_adamw import adopt_state
from shardwise.states.optimizers.state import taken
from shardwise.training.checkpoint.boxes import Box, whole_box
from shardwise.training.checkpoint.file import TYPES, StoredFile
from shardwise.training.checkpoint.index import Entry, Index, Stored, read_index, without
from shardwise.training.checkpoint.parts import OPTIMIZER, RANDOM, Held, Part, Updated, random_parts
from shardwise.training.world import World


class Reader:
    """An open checkpoint. Everything read from it is verified against its checksums.

    `bytes_read` counts bytes requested from files, `bytes_kept` those of the results, `bytes_compared` those verified.
    """

    def __init__(self, folder: Path, index: Index | None = None, locate: Callable[[str], Path] | None = None) -> None:
        """Without `index`, read that of the folder. `locate` returns the path of a file that may be elsewhere."""
        self.folder, self.index = folder, read_index(folder) if index is None else index
        self._locate = locate or (lambda file: folder / file)
        self.bytes_read = self.bytes_kept = self.bytes_compared = 0
        self._files: dict[str, StoredFile] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes_compared = sum(file.bytes_compared for file in self._files.values())
        self._files.clear()

    @property
    def weights(self) -> dict[str, Entry]:
        """The entries of the module: parameters and buffers."""
        return {name: entry for name, entry in self.index.entries.items() if "/" not in name}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a checkpoint of another model, and name the tensors that differ."""
        there = {name: entry.shape for name, entry in self.weights.items()}
        lacking = [name for name in shapes if name not in there]
        extra = [name for name in there if name not in shapes]
        other = [
            f"{name} (there {list(there[name])}, here {list(shapes[name])})"
            for name in shapes
            if name in there and there[name] != tuple(shapes[name])
        ]
        found = [("lacks", lacking), ("also has", extra), ("has in another shape", other)]
        said = "; ".join(f"it {verb} {some(names)}" for verb, names in found if names)
        if said:
            raise ShardwiseError(
                f"the checkpoint {self.folder} is of another model: {said}",
                remedy="the recipe that the checkpoint was made with, or another --folder",
            )

    def verify(self, beginning: str = "") -> None:
        """Read and verify all entries, or those whose names begin with `beginning`."""
        for name, entry in self.index.entries.items():
            if name.startswith(beginning):
                missing = whole_box(entry.shape).num_numbers
                for stored in entry.boxes:
                    self._read(entry, stored, stored.box)
                    missing -= stored.box.num_numbers
                self._check_count(name, missing)

    def fill(self, part: Part) -> None:
        """Read a part into its memory, of any dtype and device."""
        missing = part.box.num_numbers
        entry = self.index.entries[part.entry]
        for stored in entry.boxes:
            overlap = stored.box.find_overlap(part.box)
            if overlap is not None:
                numbers = self._read(entry, stored, overlap)
                part.numbers[overlap.within(part.box)].copy_(numbers)
                missing -= overlap.num_numbers
        self._check_count(part.entry, missing)
        self.bytes_kept += part.numbers.numel() * part.numbers.element_size()

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, in its saved dtype. A tensor stored as one box is not copied."""
        entry = self.index.entries[name]
        box = whole_box(entry.shape)
        for stored in entry.boxes:
            if stored.box == box:
                numbers = self._read(entry, stored, box)
                self.bytes_kept += numbers.nbytes
                return numbers
        target = torch.empty(entry.shape, dtype=self._dtype(entry))
        self.fill(Part(name, entry.shape, box, target))
        return target

    def _read(self, entry: Entry, stored: Stored, box: Box) -> Tensor:
        """Return a part of a stored box."""
        if stored.file not in self._files:
            self._files[stored.file] = StoredFile(self._locate(stored.file), self.index.files.get(stored.file))
        numbers = self._files[stored.file].read(stored, self._dtype(entry), box, self.index.block_bytes)
        self.bytes_read += numbers.nbytes
        return numbers

    def _dtype(self, entry: Entry) -> torch.dtype:
        found: object = getattr(torch, entry.dtype, None)
        if not isinstance(found, torch.dtype) or found not in TYPES:
            raise ShardwiseError(
                f"{self.folder} is damaged: its index has the type {entry.dtype!r}", remedy=without(self.folder)
            )
        return found

    def _check_count(self, name: str, missing: int) -> None:
        if missing > 0:
            raise ShardwiseError(
                f"{missing} numbers of {name} are in no file of the checkpoint {self.folder}",
                remedy=without(self.folder),
            )


@torch.no_grad()
def load(reader: Reader, held: Held) -> None:
    """Load weights and optimizer states of a checkpoint into an engine. Every rank calls this."""
    reader.check(held.shapes)
    held.settle()
    load_weights(reader, held)
    held.take_over()
    for each in _read_optimizers(reader, held):
        each.adopt()


@torch.no_grad()
def look_through(reader: Reader, held: Held) -> None:
    """Read and verify everything that `load` needs, without communication, so that missing or damaged data is found
    before any rank relies on it. This overwrites weights."""
    reader.check(held.shapes)
    held.settle()
    load_weights(reader, held)
    for each in _read_optimizers(reader, held):
        del each


@torch.no_grad()
def load_weights(reader: Reader, held: Held) -> None:
    """Load the weights that this rank holds. Copies of them elsewhere are not updated."""
    for part in held.weights():
        reader.fill(part)


class _ReadState(NamedTuple):
    """The optimizer state of a weight, read but not yet loaded."""

    of: Updated
    state: dict[str, Tensor]
    home: torch.device

    def adopt(self) -> None:
        weight, optimizer = self.of.weight, self.of.optimizer
        optimizer.state.pop(weight, None)
        if self.state:
            adopt_state(optimizer, weight, taken(self.state, weight, optimizer, self.home))


def _read_optimizers(reader: Reader, held: Held) -> Iterator[_ReadState]:
    """Yield the optimizer states. A parameter without state in the checkpoint starts with none."""
    keys: dict[str, list[str]] = {}
    for entry in reader.index.entries:
        if entry.startswith(OPTIMIZER):
            _, key, name = entry.split("/", 2)
            keys.setdefault(name, []).append(key)
    for each in held.updated():
        state: dict[str, Tensor] = {}
        home = held.home_of(each.weight)
        for key in keys.get(each.name, ()):
            entry = f"{OPTIMIZER}{key}/{each.name}"
            if reader.index.entries[entry].shape == each.shape and each.shape:
                state[key] = torch.zeros(each.weight.shape, dtype=each.weight.dtype, device=home)
                for part in each.parts(key, state[key]):
                    reader.fill(part)
            else:
                state[key] = reader.whole(entry).clone()
        yield _ReadState(each, state, home)


def load_random(reader: Reader, world: World, *, looks_at_all: bool = True) -> None:
    """Restore this rank's RNG states. A rank that the checkpoint does not have is seeded from the step.

    No rank reads the states of ranks that no longer exist, although these may be damaged too. So the first rank
    verifies all of them, if all are in one place.
    """
    if world.is_first and looks_at_all:
        reader.verify(RANDOM)
    torch.manual_seed(reader.index.step * 1000 + world.rank)
    for part in random_parts(world):
        if part.entry in reader.index.entries:
            state = reader.whole(part.entry).clone()
            if "/cuda/" in part.entry:
                torch.cuda.set_rng_state(state, world.device)
            else:
                torch.set_rng_state(state)
