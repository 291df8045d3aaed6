"""A module whose blocks do not all fit on its device: some live on the host and come in ahead of their use.

Blocks on the host are used in a known order, up in a forward and down in a backward. Before one is computed, it and the
next few are asked for; behind it, what is not among them leaves. The copies stand in one stream, back to back: each
waits for memory, which is there as soon as a block before it has been computed, and for nothing else.

    link       | 2 | 4 | 6 | 8 |
    compute    | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |       with every other block on the host

So a pass takes as long as its computation or as its bytes on the link, whichever is longer. What the host has no room
for stays on disk, and is read in the same order (`disk.py`).
"""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.disk import Records, Shelf, find_records
from shardwise.states.tiers.disk_scratch import Scratch
from shardwise.states.tiers.host_link import Link, device_of
from shardwise.states.tiers.outputs import tensors_in
from shardwise.states.tiers.streamed_block import Block, num_bytes_of
from shardwise.states.tiers.streamed_gradients import Homeward
from shardwise.torch_private import backward_id, buffer_slots, call_after_backward, without_torch_function
from shardwise.units import format_bytes

#: Blocks on the device at once: one is computed, the others are on their way. More take room and bring nothing.
NUM_AHEAD = 3


@dataclass(slots=True)
class _Arrival:
    """A block that is on the device or on its way there."""

    mark: Event
    version: int
    is_followed: bool = False


class StreamedWeights:
    """The blocks of a module that live on the host, in the order in which a forward calls them.

    `place` is where they are computed: one for all, or one for each. `stays` are parameters that are used outside of
    these blocks too, and so must be there all the time. `records` says of the blocks that stay on disk, by number,
    where, `scratches` has files of our own for those of them that can be trained. `wraps` has the first blocks brought
    at the end of a pass without gradients, for the next one.
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
        scratches: Mapping[int, Scratch] | None = None,
        wraps: bool = True,
    ) -> None:
        if num_ahead < 2:
            raise ShardwiseError(
                f"num_ahead={num_ahead}: while one block is computed another must be able to come",
                remedy="num_ahead=2 or more",
            )
        self._machine, self._wraps = machine, wraps
        self._num_ahead = min(num_ahead, len(blocks))
        on_disk, scratches = records or {}, scratches or {}
        places = [place] * len(blocks) if isinstance(place, str) else place
        links = {name: Link(machine, name) for name in places}
        self._links = [links[name] for name in places]
        self._blocks = [
            self._take(block, own, link, scratches.get(number), is_kept=number not in on_disk)
            for number, (block, own, link) in enumerate(
                zip(blocks, own_parameters(blocks, stays), self._links, strict=True)
            )
        ]
        largest = max((block.num_bytes for block in self._blocks if block.is_on_disk), default=0)
        self._shelf: Shelf | None = None
        if on_disk or scratches:
            self._shelf = Shelf(list(on_disk.values()), largest, self._num_ahead, machine)
            for number in on_disk:
                _shelve(self._blocks[number], self._shelf)
        self._versions_on_disk = {number: self._blocks[number].version for number in on_disk}
        self._arrivals: dict[int, _Arrival] = {}
        #: What the weights were when autograd last saw them in a forward.
        self._versions: dict[int, int] = {}
        # In a backward every GPU has a thread of its own, and a machine is one thread's at a time.
        self._one_at_a_time = threading.RLock()
        self._gradients = Homeward(machine, self.device_bytes, self._one_at_a_time)
        for block, link in zip(self._blocks, self._links, strict=True):
            self._gradients.watch(block, link)
        self._backwards: set[int] = set()  # Passes of autograd that are under way: one may run inside of another.
        self._hooks = [hook for number, block in enumerate(blocks) for hook in self._hook(number, block)]

    @property
    def host_bytes(self) -> int:
        """What is kept on the host, and crosses the link in every pass."""
        return sum(block.num_bytes for block in self._blocks if not block.is_on_disk)

    @property
    def disk_bytes(self) -> int:
        """What stays on disk, and is read in every pass."""
        return sum(block.num_bytes for block in self._blocks if block.is_on_disk)

    @property
    def device_bytes(self) -> int:
        """The most weights that are on devices at once. In a backward there may be as many gradients."""
        sizes = [block.num_bytes for block in self._blocks]
        return max(
            (sum((sizes + sizes)[at : at + self._num_ahead]) for at in range(len(sizes))),
            default=0,
        )

    @property
    def guests(self) -> list[Tensor]:
        """Memory on the devices that blocks come to, or that is empty for now."""
        return [block.device for block in self._blocks]

    def weights(self) -> dict[nn.Parameter, Tensor]:
        """The weights on the host: they are the parameters' own memory. Those on disk are not among them."""
        kept = [block for block in self._blocks if not block.is_on_disk]
        return {parameter: parameter.data for block in kept for parameter in block.parameters}

    def refresh(self) -> None:
        """The weights on the host have changed in a way that torch does not see (`parameter.data`): bring them anew."""
        for number in list(self._arrivals):
            self._leave(number)

    def close(self) -> None:
        """Leave the module as it was, on the CPU. Weights on disk are those of the mapped files, read when used."""
        self.refresh()
        self._gradients.close()
        for hook in self._hooks:
            hook.remove()
        if self._shelf is not None:
            for block in self._blocks:
                for piece in block.pieces if block.host is None else ():
                    piece.parameter.data = piece.parameter.data.to(piece.guest.dtype)
            self._shelf.close()

    def _take(
        self, block: nn.Module, parameters: list[nn.Parameter], link: Link, scratch: Scratch | None, *, is_kept: bool
    ) -> Block:
        with torch.inference_mode(False):  # It may be trained later.
            home: Tensor | Scratch | None = scratch
            if scratch is None and is_kept:
                home = self._machine.pinned((num_bytes_of(parameters),), torch.uint8)
            return Block(block, parameters, home, link.device)

    def _hook(self, number: int, block: nn.Module) -> list[Any]:
        return [
            block.register_forward_pre_hook(partial(self._before_forward, number)),
            block.register_forward_hook(partial(self._after_forward, number), always_call=True),
        ]

    def _before_forward(self, number: int, *_: object) -> None:
        # Not as torch functions: where a placed module's tensors meet, a copy between devices would be one on a device.
        with without_torch_function():
            if is_in_backward():  # It is computed once more, for what it has not kept.
                self._note_backward()
                self._want(number, self._downward(number))
            else:
                if self._backwards:  # One was broken off by an error.
                    self._backwards.clear()
                    self._gradients.drop()
                self._want(number, self._upward(number))
            if torch.is_grad_enabled():
                self._versions[number] = self._blocks[number].version
            self._blocks[number].seat_guests()

    def _after_forward(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        self._blocks[number].seat_owners()
        for each in tensors_in(output) if torch.is_grad_enabled() else ():
            if each.requires_grad and not each.is_leaf:
                each.register_hook(partial(self._before_backward, number))  # type: ignore[no-untyped-call]

    def _before_backward(self, number: int, *_: object) -> None:
        if self._versions.get(number) != self._blocks[number].version:
            raise ShardwiseError(
                "weights of a streamed block were changed between a forward and its backward",
                remedy="backward() first, then optimizer.step()",
            )
        self._note_backward()
        self._want(number, self._downward(number))

    def _note_backward(self) -> None:
        """Have autograd say when the pass is over that it is at."""
        here = backward_id()
        if here not in self._backwards:
            self._backwards.add(here)
            call_after_backward(partial(self._after_backward, here))

    def _after_backward(self, here: int) -> None:
        """Gradients are given out; and weights that are about to be updated need not be here."""
        self._backwards.discard(here)
        if not self._backwards:
            self._gradients.settle()
            with self._one_at_a_time:
                self.refresh()

    def _upward(self, number: int) -> list[int]:
        """A block and those after it. After the last come the first of the next pass, or a backward, from the last."""
        count = len(self._blocks)
        if self._wraps and not torch.is_grad_enabled():
            return [each % count for each in range(number, number + self._num_ahead)]
        return list(range(min(number, count - self._num_ahead), min(number + self._num_ahead, count)))

    def _downward(self, number: int) -> list[int]:
        return list(range(number, max(-1, number - self._num_ahead), -1))

    def _want(self, number: int, wanted: Iterable[int]) -> None:
        """Have a block on the device before what is computed next, and those after it on their way."""
        keep = list(wanted)
        with self._one_at_a_time:
            for other, arrival in list(self._arrivals.items()):
                block = self._blocks[other]
                if other not in keep or arrival.version != block.version or not block.is_gathered:
                    self._leave(other)
            for each in keep:
                if each not in self._arrivals:
                    self._arrivals[each] = self._bring(each)
            self._follow(number)
        if self._machine.failures.first is not None:
            raise self._machine.failures.first

    def _bring(self, number: int) -> _Arrival:
        block, link = self._blocks[number], self._links[number]
        with torch.inference_mode(False):
            block.gather()
        target = block.arrive()
        if block.host is not None and not block.is_on_disk:
            return _Arrival(link.inward(target, block.host), block.version)
        assert self._shelf is not None, "only what has a place on disk is not kept on the host"
        if number in self._versions_on_disk and block.version != self._versions_on_disk[number]:
            raise ShardwiseError(
                "weights of a block that stays on disk were changed, and its files were not",
                remedy="a larger host_bytes, or an optimizer of the parameters outside of these blocks",
            )
        source, read = self._shelf.read(block)
        arrival = link.inward(target, source, [read])
        self._shelf.sent(arrival)
        return _Arrival(arrival, block.version)

    def _follow(self, number: int) -> None:
        arrival = self._arrivals[number]
        if not arrival.is_followed:
            self._links[number].follow(arrival.mark)
            arrival.is_followed = True

    def _leave(self, number: int) -> None:
        # Memory is used again in the order of what is computed: that has to come after the copy into it.
        self._follow(number)
        del self._arrivals[number]
        self._blocks[number].leave()


def _shelve(block: Block, shelf: Shelf) -> None:
    """Let the parameters of a block on disk look into its files, in the files' own precision, and take no memory."""
    for parameter in block.parameters:
        parameter.data = shelf.weights(parameter)


def is_in_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return backward_id() != -1


def stream(
    module: nn.Module,
    machine: Machine,
    place: str,
    *,
    blocks: Sequence[nn.Module],
    room_bytes: int | None = None,
    host_bytes: int | None = None,
    folder: Path | str | None = None,
    scratch: Path | str | None = None,
) -> StreamedWeights | None:
    """Put a module on a place, with as many of its blocks on the host as do not fit into `room_bytes` beside the rest.

    Without a limit all `blocks` are streamed. Those on the host are spread evenly among the others, so that the link is
    busy all the time. Of these, what does not fit into `host_bytes` stays on disk: in the safetensors of `folder`, by
    the names of the module, or written into it if it is empty. Or, if it is to be trained, in files of our own in
    `scratch`, with its gradients. Returns None if everything fits.
    """
    device = device_of(place)
    stays = shared_parameters(module, blocks)
    sizes = [num_bytes_of(own) for own in own_parameters(blocks, stays)]
    on_host = list(range(len(blocks)))
    if room_bytes is not None:
        rest = sum(each.numel() * each.element_size() for each in module.parameters()) - _weight_bytes(blocks, stays)
        on_host = spread(len(blocks), _how_many(rest, sizes, room_bytes, place))
    streamed = [blocks[number] for number in on_host]
    held = {id(each) for own in own_parameters(streamed, stays) for each in own}
    own = own_parameters(streamed, stays)
    records, scratches = {}, {}
    if scratch is None:
        records = find_on_disk(module, own, host_bytes, folder)
    elif host_bytes is not None:
        bytes_of = [num_bytes_of(each) for each in own]
        scratches = make_scratches(fewest(bytes_of, [0] * len(own), host_bytes) or range(0), bytes_of, scratch)
    weights = None
    if streamed:
        weights = StreamedWeights(streamed, machine, place, stays=stays, records=records, scratches=scratches)
    with torch.no_grad():
        for parameter in module.parameters():
            if id(parameter) not in held:
                parameter.data = parameter.data.to(device)
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                buffer_slots(each)[name] = buffer.to(device)
    return weights


def find_on_disk(
    module: nn.Module, blocks: Sequence[list[nn.Parameter]], host_bytes: int | None, folder: Path | str | None
) -> dict[int, Records]:
    """Which of the streamed blocks stay on disk, by number, and where. They are spread evenly too."""
    sizes = [num_bytes_of(own) for own in blocks]
    if host_bytes is None or sum(sizes) <= host_bytes:
        return {}
    if folder is None:
        raise ShardwiseError(
            f"no room on the host: {format_bytes(sum(sizes))} of weights are to live there, and host_bytes is"
            f" {format_bytes(host_bytes)}",
            remedy='folder="..." for what does not fit: a checkpoint\'s, or an empty one',
        )
    chosen = fewest(sizes, [0] * len(sizes), host_bytes) or list(range(len(sizes)))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = find_records(Path(folder), [blocks[number] for number in chosen], names)
    return dict(zip(chosen, found, strict=True))


def fewest(sizes: Sequence[int], left: Sequence[int], room_bytes: int) -> list[int] | None:
    """The fewest blocks, spread evenly, that have to go so that there is room; of one that goes something may be left.

    None if there is no room even if all of them go.
    """
    for count in range(len(sizes) + 1):
        chosen = set(spread(len(sizes), count))
        if sum(left[at] if at in chosen else size for at, size in enumerate(sizes)) <= room_bytes:
            return sorted(chosen)
    return None


def make_scratches(chosen: Iterable[int], sizes: Sequence[int], folder: Path | str) -> dict[int, Scratch]:
    """Files for blocks that are trained on disk: all of them before anything moves, so that a full disk says so."""
    return {number: Scratch(Path(folder), sizes[number]) for number in chosen}


def own_parameters(blocks: Sequence[nn.Module], stays: Collection[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each block, but for those that stay."""
    kept = set(stays)
    return [[parameter for parameter in block.parameters() if parameter not in kept] for block in blocks]


def shared_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Parameters of blocks that somebody else has too, another block or what is in none: an embedding that a block
    is tied to, say."""
    owners: dict[nn.Parameter, int] = {}
    inside = {each for block in blocks for each in block.modules()}
    for block in blocks:
        for parameter in block.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    for each in module.modules():
        for one in each.parameters(recurse=False) if each not in inside else ():
            owners[one] = owners.get(one, 0) + 1
    mine = {parameter for block in blocks for parameter in block.parameters()}
    return {parameter for parameter in mine if owners[parameter] > 1}


def spread(num_blocks: int, num_chosen: int) -> list[int]:
    """Choose so many of the blocks, as evenly as they go."""
    so_far = [number * num_chosen // num_blocks for number in range(num_blocks + 1)]
    return [number for number in range(num_blocks) if so_far[number + 1] > so_far[number]]


def _weight_bytes(blocks: Sequence[nn.Module], stays: Collection[nn.Parameter]) -> int:
    """What the blocks' own parameters take, without gaps between them."""
    return sum(each.numel() * each.element_size() for own in own_parameters(blocks, stays) for each in own)


def _how_many(rest: int, sizes: Sequence[int], room_bytes: int, place: str) -> int:
    """The fewest blocks on the host that leave room for the others, the rest of the module, and those that come."""
    ahead = sum(sorted(sizes)[-NUM_AHEAD:])
    total = sum(sizes)
    if rest + total <= room_bytes:
        return 0
    left = total
    for count in range(1, len(sizes) + 1):
        left = sum(size for number, size in enumerate(sizes) if number not in set(spread(len(sizes), count)))
        if rest + left + ahead <= room_bytes:
            return count
    raise ShardwiseError(
        f"no room at {place}: {format_bytes(rest)} outside of the {len(sizes)} blocks and {format_bytes(ahead)} for"
        f" the {NUM_AHEAD} that are on their way are needed, and there are {format_bytes(room_bytes)}",
        remedy=f"at least {format_bytes(rest + ahead)}",
    )
