"""A module whose blocks do not all fit on its device: some live on the host and are copied ahead of use.

Blocks on the host are used in a known order: up in a forward and down in a backward. Before a block is computed, it and
the next few are requested: the prefetch window. After it, blocks outside the window leave. The copies are in one
stream, back to back: each waits only for memory, which is free as soon as an earlier block has been computed.

    link       | 2 | 4 | 6 | 8 |
    compute    | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |       with every other block on the host

So a pass takes as long as its computation or its bytes on the link, whichever is longer. What does not fit on the host
stays on disk, and is read in the same order (`disk.py`).
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event
from shardwise.errors import ShardwiseError
from shardwise.stages.split.outline import tensors_in
from shardwise.states.tiers.copy_streams import CopyStreams, device_of
from shardwise.states.tiers.disk import DiskReader, Records
from shardwise.states.tiers.streamed_block import ScratchFile, StreamedBlock, num_bytes_of
from shardwise.states.tiers.streamed_gradients import StreamedGradients
from shardwise.states.tiers.swapped_storage import Presence, SourcedStorage
from shardwise.torch_private import backward_id, before_gradient, call_after_backward, without_torch_function

#: Blocks on the device at once: one is computed, the others are in transit. More take memory without a gain.
NUM_AHEAD = 3


class StreamedWeights:
    """The blocks of a module that live on the host, in the order in which a forward calls them.

    `place` is where they are computed: one for all, or one for each. `stays` are parameters that are also used outside
    these blocks, and so must stay on the device. `records` gives the place of blocks on disk, by number, and
    `scratches` our files for those of them that can be trained. `wraps`: prefetch the first blocks at the end of a pass
    without gradients, for the next one.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        machine: Machine,
        place: str | Sequence[str],
        *,
        stays: Collection[nn.Parameter] = (),
        num_ahead: int = NUM_AHEAD,
        records: Mapping[int, Records] | None = None,
        scratches: Mapping[int, ScratchFile] | None = None,
        wraps: bool = True,
    ) -> None:
        if num_ahead < 2:
            raise ShardwiseError(
                f"num_ahead={num_ahead}: while one block is computed, another must be prefetched",
                remedy="num_ahead=2 or more",
            )
        self._machine, self._wraps = machine, wraps
        self._num_ahead = min(num_ahead, len(blocks))
        on_disk, scratches = records or {}, scratches or {}
        places = [place] * len(blocks) if isinstance(place, str) else place
        by_place = {name: CopyStreams(device_of(name), machine, name) for name in places}
        self._copies = [by_place[name] for name in places]
        self._blocks: list[StreamedBlock] = []
        for number, (module, own) in enumerate(zip(blocks, own_parameters(blocks, stays), strict=True)):
            with torch.inference_mode(False):  # It may be trained later.
                source: Tensor | ScratchFile | None = scratches.get(number)
                if source is None and number not in on_disk:
                    source = machine.pinned((num_bytes_of(own),), torch.uint8)
                self._blocks.append(StreamedBlock(module, own, source, self._copies[number].device))
        self._storages = [
            SourcedStorage(block.device, copies, partial(self._fetch, number))
            for number, (block, copies) in enumerate(zip(self._blocks, self._copies, strict=True))
        ]
        self._reader: DiskReader | None = None
        if on_disk or scratches:
            largest = max((block.num_bytes for block in self._blocks if block.is_on_disk), default=0)
            self._reader = DiskReader(list(on_disk.values()), largest, self._num_ahead, machine)
            for parameter in [each for number in on_disk for each in self._blocks[number].parameters]:
                # The parameter maps its file, in the file's own precision, and takes no memory.
                parameter.data = self._reader.weights(parameter)
        self._versions_on_disk = {number: self._blocks[number].version for number in on_disk}
        #: The versions of the weights when they were last copied, and when autograd last saw them in a forward.
        self._versions_here: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        # In a backward every GPU has its own thread, and a machine must be used by one thread at a time.
        self._one_at_a_time = threading.RLock()
        self._gradients = StreamedGradients(machine, self.device_bytes, self._one_at_a_time)
        for block, copies in zip(self._blocks, self._copies, strict=True):
            self._gradients.watch(block, copies)
        self._backwards: set[int] = set()  # Backward passes in progress: one may run inside another.
        self._hooks: list[Any] = []
        for number, module in enumerate(blocks):
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before_forward, number)),
                module.register_forward_hook(partial(self._after_forward, number), always_call=True),
            ]

    @property
    def host_bytes(self) -> int:
        """The bytes kept on the host, which cross the link in every pass."""
        return sum(block.num_bytes for block in self._blocks if not block.is_on_disk)

    @property
    def disk_bytes(self) -> int:
        """The bytes that stay on disk, and are read in every pass."""
        return sum(block.num_bytes for block in self._blocks if block.is_on_disk)

    @property
    def device_bytes(self) -> int:
        """The most bytes of weights on devices at once. In a backward there may be as many of gradients."""
        sizes = [block.num_bytes for block in self._blocks]
        return max((sum((sizes + sizes)[at : at + self._num_ahead]) for at in range(len(sizes))), default=0)

    @property
    def swapped(self) -> list[Tensor]:
        """The memory on devices for blocks, which may be empty at the moment."""
        return [block.device for block in self._blocks]

    def weights(self) -> dict[nn.Parameter, Tensor]:
        """Return the weights on the host, which are the parameters' own memory. Those on disk are not included."""
        kept = [block for block in self._blocks if not block.is_on_disk]
        return {parameter: parameter.data for block in kept for parameter in block.parameters}

    def refresh(self) -> None:
        """Copy the weights again: they have changed on the host in a way that torch does not see (`parameter.data`)."""
        for storage in self._storages:
            storage.leave()

    def close(self) -> None:
        """Restore the module on the CPU. Weights on disk stay mapped files, read on use."""
        self.refresh()
        self._gradients.close()
        for hook in self._hooks:
            hook.remove()
        if self._reader is not None:
            for member in [each for block in self._blocks if block.host is None for each in block.members]:
                member.parameter.data = member.parameter.data.to(member.packed.dtype)
            self._reader.close()

    def _before_forward(self, number: int, *_: object) -> None:
        # Not as torch functions: in a placed module, a copy between devices would be intercepted and run on one device.
        with without_torch_function():
            if backward_id() != -1:  # In a backward of this thread: recomputation.
                self._note_backward()
                self._want(number, self._downward(number))
            else:
                if self._backwards:  # One was interrupted by an error.
                    self._backwards.clear()
                    self._gradients.drop()
                self._want(number, self._upward(number))
            if torch.is_grad_enabled():
                self._versions[number] = self._blocks[number].version
            self._blocks[number].bind_device()

    def _after_forward(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        self._blocks[number].bind_host()
        for each in tensors_in(output) if torch.is_grad_enabled() else ():
            if each.requires_grad and not each.is_leaf:
                before_gradient(each, partial(self._before_backward, number))

    def _before_backward(self, number: int) -> None:
        if self._versions.get(number) != self._blocks[number].version:
            raise ShardwiseError(
                "weights of a streamed block were changed between a forward and its backward",
                remedy="backward() first, then optimizer.step()",
            )
        self._note_backward()
        self._want(number, self._downward(number))

    def _note_backward(self) -> None:
        """Ask autograd for a callback at the end of the current pass."""
        here = backward_id()
        if here not in self._backwards:
            self._backwards.add(here)
            call_after_backward(partial(self._after_backward, here))

    def _after_backward(self, here: int) -> None:
        """Give out gradients; drop weights that are about to be updated."""
        self._backwards.discard(here)
        if not self._backwards:
            self._gradients.settle()
            with self._one_at_a_time:
                self.refresh()

    def _upward(self, number: int) -> list[int]:
        """Return a block and those after it. After the last come the first of the next pass, or the last of a
        backward."""
        count = len(self._blocks)
        if self._wraps and not torch.is_grad_enabled():
            return [each % count for each in range(number, number + self._num_ahead)]
        return list(range(min(number, count - self._num_ahead), min(number + self._num_ahead, count)))

    def _downward(self, number: int) -> list[int]:
        return list(range(number, max(-1, number - self._num_ahead), -1))

    def _want(self, number: int, window: Iterable[int]) -> None:
        """Make a block available to later computation, and prefetch the window from it on."""
        keep = list(window)
        with self._one_at_a_time:
            for other, storage in enumerate(self._storages):
                if storage.state is not Presence.AWAY and (other not in keep or self._is_old(other)):
                    storage.leave()
            for each in keep:
                self._storages[each].start()
            self._storages[number].follow()
        if self._machine.failures.first is not None:
            raise self._machine.failures.first

    def _is_old(self, number: int) -> bool:
        """Whether the weights on the host were changed since a block came."""
        block = self._blocks[number]
        return self._versions_here[number] != block.version or not block.is_gathered

    def _fetch(self, number: int, after: Sequence[Event]) -> Event:
        """Copy a block to the device: from pinned memory, or from its file."""
        block, copies = self._blocks[number], self._copies[number]
        with torch.inference_mode(False):
            block.gather()
        self._versions_here[number] = block.version
        if block.host is not None and not block.is_on_disk:
            return copies.to_device(block.device, block.host, after)
        assert self._reader is not None, "only what has a place on disk is not kept on the host"
        if number in self._versions_on_disk and block.version != self._versions_on_disk[number]:
            raise ShardwiseError(
                "weights of a block that stays on disk were changed, and its files were not",
                remedy="a larger host_bytes, or an optimizer of the parameters outside of these blocks",
            )
        return self._reader.fetch(block, copies, after)


def own_parameters(blocks: Sequence[nn.Module], stays: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters of each block, except those that stay."""
    kept = set(stays)
    return [[parameter for parameter in block.parameters() if parameter not in kept] for block in blocks]


def shared_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return parameters of blocks that are also used elsewhere, in another block or outside blocks: an embedding that a
    block is tied to, for example."""
    inside = {each for block in blocks for each in block.modules()}
    mine = Counter(parameter for block in blocks for parameter in block.parameters())
    others = {one for each in module.modules() if each not in inside for one in each.parameters(recurse=False)}
    return {parameter for parameter, count in mine.items() if count > 1 or parameter in others}
