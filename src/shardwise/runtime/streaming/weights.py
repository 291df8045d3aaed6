"""A module whose blocks do not all fit on its device: some live on the host and come in ahead of their use.

Blocks on the host are used in a known order, up in a forward and down in a backward. Before one is computed, it and the
next few are asked for; behind it, what is not among them leaves. The copies stand in one stream, back to back: each
waits for memory, which is there as soon as a block before it has been computed, and for nothing else.

    link       | 2 | 4 | 6 | 8 |
    compute    | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |       with every other block on the host

So a pass takes as long as its computation or as its bytes on the link, whichever is longer. What the host has no room
for stays on disk, and is read in the same order (`disk.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Mark
from shardwise.errors import ShardwiseError
from shardwise.runtime.streaming.block import Block, num_bytes_of
from shardwise.runtime.streaming.disk import Records, Shelf, find_records
from shardwise.units import format_bytes

#: Blocks on the device at once: one is computed, the others are on their way. More take room and bring nothing.
_AHEAD = 3


class StreamedWeights:
    """The blocks of a module that live on the host, in the order in which a forward calls them.

    `stays` are parameters that are used outside of these blocks too, and so must be there all the time. `records` says
    of the blocks that stay on disk, by number, where.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        machine: Machine,
        place: str,
        *,
        stays: Collection[nn.Parameter] = (),
        num_ahead: int = _AHEAD,
        records: Mapping[int, Records] | None = None,
    ) -> None:
        if num_ahead < 2:
            raise ShardwiseError(
                f"num_ahead={num_ahead}: while one block is computed another must be able to come",
                remedy="num_ahead=2 or more",
            )
        self._machine, self._place = machine, place
        self._device = torch.device("cpu" if place.startswith("cpu") else place)
        self._num_ahead = min(num_ahead, len(blocks))
        on_disk = records or {}
        self._blocks = [
            self._take(own, is_kept=number not in on_disk) for number, own in enumerate(own_parameters(blocks, stays))
        ]
        largest = max((self._blocks[number].num_bytes for number in on_disk), default=0)
        self._shelf = Shelf(list(on_disk.values()), largest, self._num_ahead, machine) if on_disk else None
        self._arrivals: dict[int, Mark] = {}
        self._hooks = [hook for number, block in enumerate(blocks) for hook in self._hook(number, block)]

    @property
    def host_bytes(self) -> int:
        """What is kept on the host, and crosses the link in every pass."""
        return sum(block.num_bytes for block in self._blocks if block.host is not None)

    @property
    def disk_bytes(self) -> int:
        """What stays on disk, and is read in every pass."""
        return sum(block.num_bytes for block in self._blocks if block.host is None)

    @property
    def device_bytes(self) -> int:
        """The most that is on the device at once."""
        sizes = [block.num_bytes for block in self._blocks]
        return max(
            (sum((sizes + sizes)[at : at + self._num_ahead]) for at in range(len(sizes))),
            default=0,
        )

    def weights(self) -> dict[nn.Parameter, Tensor]:
        """The weights on the host: what a state dictionary saves, and what an optimizer on the host writes.

        Those on disk are not among them: they are what their files say.
        """
        return {parameter: each for block in self._blocks for parameter, each in block.on_host().items()}

    def refresh(self) -> None:
        """The weights on the host have changed: those on the device are old."""
        for number in list(self._arrivals):
            self._leave(number)

    def close(self) -> None:
        """Bring everything back to the host for good, and leave the module as it was, on the CPU.

        Weights on disk are then those of the mapped files, read when they are used.
        """
        self.refresh()
        for hook in self._hooks:
            hook.remove()
        for parameter, each in self.weights().items():
            parameter.data = each
        if self._shelf is not None:
            for block in self._blocks:
                for parameter in block.parameters if block.host is None else ():
                    parameter.data = self._shelf.weights(parameter).to(parameter.dtype)
            self._shelf.close()

    def _take(self, parameters: list[nn.Parameter], *, is_kept: bool) -> Block:
        pinned = self._machine.pinned((num_bytes_of(parameters),), torch.uint8) if is_kept else None
        return Block(parameters, pinned, self._device)

    def _hook(self, number: int, block: nn.Module) -> list[Any]:
        return [
            block.register_forward_pre_hook(partial(self._before_forward, number)),
            block.register_full_backward_pre_hook(partial(self._before_backward, number)),
        ]

    def _before_forward(self, number: int, *_: object) -> None:
        # After the last block comes the first one of the next pass; but where gradients are wanted, the last one again.
        self._want(number, self._upward(number, wraps=not torch.is_grad_enabled()))

    def _before_backward(self, number: int, *_: object) -> None:
        self._want(number, range(number, max(-1, number - self._num_ahead), -1))

    def _upward(self, number: int, *, wraps: bool) -> list[int]:
        following = range(number, number + self._num_ahead)
        count = len(self._blocks)
        return [each % count for each in following if wraps or each < count]

    def _want(self, number: int, wanted: Iterable[int]) -> None:
        """Have a block on the device before what is computed next, and those after it on their way."""
        keep = list(wanted)
        for other in list(self._arrivals):
            if other not in keep:
                self._leave(other)
        for each in keep:
            if each not in self._arrivals:
                block = self._blocks[each]
                target = block.arrive()
                # The memory was somebody else's until all that is put to compute by now has been computed.
                after = [self._machine.mark(self._place)]
                self._arrivals[each] = self._bring(block, target, after)
        self._follow(self._arrivals[number])
        if self._machine.failures.first is not None:
            raise self._machine.failures.first

    def _bring(self, block: Block, target: Tensor, after: list[Mark]) -> Mark:
        if block.host is not None:
            return self._copy(target, block.host, after)
        assert self._shelf is not None, "only what has a place on disk is not kept on the host"
        source, read = self._shelf.read(block)
        arrival = self._copy(target, source, [*after, read])
        self._shelf.sent(arrival)
        return arrival

    def _copy(self, target: Tensor, source: Tensor, after: list[Mark]) -> Mark:
        if self._device.type == "cpu":
            return self._machine.copy(target, source, to=self._place, of="host", after=after)
        return self._machine.copy(target, source, after=after)

    def _leave(self, number: int) -> None:
        if self._device.type == "cpu":
            self._arrivals[number].wait()
        del self._arrivals[number]
        self._blocks[number].leave()

    def _follow(self, mark: Mark) -> None:
        if self._device.type == "cpu":
            mark.wait()  # What a user's own thread computes comes after nothing but itself.
        else:
            self._machine.follow(self._place, mark)


def stream(
    module: nn.Module,
    machine: Machine,
    place: str,
    *,
    blocks: Sequence[nn.Module],
    room_bytes: int | None = None,
    host_bytes: int | None = None,
    folder: Path | str | None = None,
) -> StreamedWeights | None:
    """Put a module on a place, with as many of its blocks on the host as do not fit into `room_bytes` beside the rest.

    Without a limit all `blocks` are streamed. Those on the host are spread evenly among the others, so that the link is
    busy all the time. Of these, what does not fit into `host_bytes` stays on disk: in the safetensors of `folder`, by
    the names of the module, or written into it if it is empty. Returns None if everything fits.
    """
    device = torch.device("cpu" if place.startswith("cpu") else place)
    stays = shared_parameters(module, blocks)
    sizes = [num_bytes_of(own) for own in own_parameters(blocks, stays)]
    on_host = list(range(len(blocks)))
    if room_bytes is not None:
        rest = sum(each.numel() * each.element_size() for each in module.parameters()) - _weight_bytes(blocks, stays)
        on_host = spread(len(blocks), _how_many(rest, sizes, room_bytes, place))
    streamed = [blocks[number] for number in on_host]
    held = {id(each) for own in own_parameters(streamed, stays) for each in own}
    records = _on_disk(module, own_parameters(streamed, stays), host_bytes, folder)
    weights = StreamedWeights(streamed, machine, place, stays=stays, records=records) if streamed else None
    with torch.no_grad():
        for parameter in module.parameters():
            if id(parameter) not in held:
                parameter.data = parameter.data.to(device)
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                each._buffers[name] = buffer.to(device)
    return weights


def _on_disk(
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
    for count in range(1, len(sizes) + 1):
        chosen = spread(len(sizes), count)
        if sum(size for number, size in enumerate(sizes) if number not in set(chosen)) <= host_bytes:
            break
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = find_records(Path(folder), [blocks[number] for number in chosen], names)
    return dict(zip(chosen, found, strict=True))


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
    ahead = sum(sorted(sizes)[-_AHEAD:])
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
        f" the {_AHEAD} that are on their way are needed, and there are {format_bytes(room_bytes)}",
        remedy=f"at least {format_bytes(rest + ahead)}",
    )
