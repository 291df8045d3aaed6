"""Memory of the device for what visits it: some slots, which one visitor after the other has.

What lies behind each other at home, with the same gaps as in its slot, is copied at once: `in_runs`. So homes are laid
out like slots (`lay_out`), and most rounds are one copy each way, however many tensors they have.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.torch_private import storage_id

#: Where a tensor may begin in a slot.
ALIGNMENT = 256

#: The part of a GPU's memory that visitors may have, and of what was never needed of it. State that is there when a
#: backward begins need not come in under it; the rest is for larger batches than those so far.
PART_OF_ALL, _PART_OF_SPARE = 1 / 12, 1 / 2


class Slots:
    """So many slots, each as large as the largest visitor that it has had."""

    def __init__(self, count: int, crossing: Crossing) -> None:
        self._crossing = crossing
        self._memory: list[Tensor | None] = []
        #: Those that nobody has, and when the last one to have it is gone.
        self._free: deque[tuple[int, list[Event]]] = deque()
        self.grow(count)

    @property
    def are_free(self) -> bool:
        """Whether there is one to take."""
        return bool(self._free)

    def grow(self, count: int) -> None:
        """Have at least so many slots. Memory is taken when the first one comes to them."""
        for _ in range(count - len(self._memory)):
            self._free.append((len(self._memory), []))
            self._memory.append(None)

    def fill(self, size: int) -> None:
        """Take memory of so many bytes for each now. The caller's stream is the one that others compute in."""
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self._crossing.device) for _ in self._memory]
        computed = self._crossing.computed()
        self._free = deque((slot, [*gone, *computed]) for slot, gone in self._free)

    def take(self, visitors: Sequence[Tensor]) -> tuple[int, list[Tensor], list[Event]]:
        """A slot with places for tensors like these, and marks after which they may be written."""
        slot, gone = self._free.popleft()
        size, memory = size_of(visitors), self._memory[slot]
        if memory is None or memory.numel() < size:
            for mark in gone:
                mark.wait()
            memory = self._memory[slot] = torch.empty(size, dtype=torch.uint8, device=self._crossing.device)
            gone = self._crossing.computed()  # Memory that was just taken has been somebody else's until now.
        return slot, lay_out(memory, visitors), gone

    def has(self, slot: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in a slot."""
        memory = self._memory[slot]
        return memory is not None and _storage(memory) == _storage(tensor)

    def give_back(self, slot: int, gone: Sequence[Event]) -> None:
        """Nobody has a slot any more once some marks are reached."""
        self._free.append((slot, list(gone)))

    def clear(self) -> None:
        """Give the memory back. Nobody may be in it."""
        self._memory = [None] * len(self._memory)


def size_of(tensors: Iterable[Tensor]) -> int:
    """The bytes that tensors take which are laid out."""
    return sum(_aligned(each.nbytes) for each in tensors)


def lay_out(memory: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Places for tensors like these, behind each other in memory."""
    found, at = [], 0
    for each in tensors:
        found.append(memory[at : at + each.nbytes].view(each.dtype).view(each.shape))
        at += _aligned(each.nbytes)
    return found


def in_runs(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Copies that do what these would do, and are fewer: of what lies alike at both ends one is made."""
    run: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        if run and not _are_behind(run[-1], pair):
            yield _as_one(run)
            run = []
        run.append(pair)
    if run:
        yield _as_one(run)


def _are_behind(before: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor]) -> bool:
    """Whether nothing but the padding of `lay_out` is between the two, at both ends."""
    gaps = set()
    for one, other in zip(before, pair, strict=True):
        if _storage(one) != _storage(other):
            return False
        start, end = _start(other), _start(one) + one.nbytes
        gaps.add(start - end if start in (end, _aligned(end)) else None)
    return len(gaps) == 1 and None not in gaps


def _as_one(run: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    one, other = (_bytes_between(*ends) for ends in zip(first, last, strict=True))
    return one, other


def _bytes_between(first: Tensor, last: Tensor) -> Tensor:
    """The memory from the beginning of one tensor to the end of another."""
    start, end = _start(first), _start(last) + last.nbytes
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        first.untyped_storage(), start, (end - start,), (1,)
    )


def spare_bytes(device: torch.device) -> int:
    """What visitors may have of a GPU's memory, beside those slots that are counted: part of what nobody has needed."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free * _PART_OF_SPARE, total * PART_OF_ALL))


def _storage(tensor: Tensor) -> int:
    return int(storage_id(tensor.untyped_storage()))


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
