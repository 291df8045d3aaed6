"""Choose the blocks of a module to stream, from the host or from disk, and put the others on its device."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.choose_offloaded import choose_for_room, choose_offloaded
from shardwise.states.tiers.copy_streams import device_of
from shardwise.states.tiers.disk import Records, find_records
from shardwise.states.tiers.streamed_block import ScratchFile, num_bytes_of
from shardwise.states.tiers.streamed_weights import NUM_AHEAD, StreamedWeights, own_parameters, shared_parameters
from shardwise.torch_private import buffer_slots
from shardwise.units import format_bytes


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
    stays = shared_parameters(module, blocks)
    every = own_parameters(blocks, stays)
    sizes = [num_bytes_of(own) for own in every]
    on_host = list(range(len(blocks)))
    if room_bytes is not None:
        rest = sum(each.nbytes for each in module.parameters()) - sum(each.nbytes for own in every for each in own)
        on_host = _choose(rest, sizes, room_bytes, place)
    streamed = [blocks[number] for number in on_host]
    own = [every[number] for number in on_host]
    held = {each for mine in own for each in mine}
    records, scratches = {}, {}
    if scratch is None:
        records = find_on_disk(module, own, host_bytes, folder)
    elif host_bytes is not None:
        bytes_of = [num_bytes_of(each) for each in own]
        scratches = make_scratches(choose_for_room(bytes_of, [0] * len(own), host_bytes) or [], bytes_of, scratch)
    weights = None
    if streamed:
        weights = StreamedWeights(streamed, machine, place, stays=stays, records=records, scratches=scratches)
    _put_on(module, device_of(place), held)
    return weights


@torch.no_grad()
def _put_on(module: nn.Module, device: torch.device, held: Collection[nn.Parameter]) -> None:
    """Move everything that is not streamed."""
    for parameter in module.parameters():
        if parameter not in held:
            parameter.data = parameter.data.to(device)
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            buffer_slots(each)[name] = buffer.to(device)


def find_on_disk(
    module: nn.Module, blocks: Sequence[list[nn.Parameter]], host_bytes: int | None, folder: Path | str | None
) -> dict[int, Records]:
    """Return which of the streamed blocks stay on disk, by number, and where. They are spread evenly too."""
    sizes = [num_bytes_of(own) for own in blocks]
    if host_bytes is None or sum(sizes) <= host_bytes:
        return {}
    if folder is None:
        raise ShardwiseError(
            f"no room on the host: {format_bytes(sum(sizes))} of weights would go there, and host_bytes is"
            f" {format_bytes(host_bytes)}",
            remedy='folder="..." for what does not fit: a checkpoint\'s, or an empty one',
        )
    chosen = choose_for_room(sizes, [0] * len(sizes), host_bytes) or list(range(len(sizes)))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = find_records(Path(folder), [blocks[number] for number in chosen], names)
    return dict(zip(chosen, found, strict=True))


def make_scratches(chosen: Iterable[int], sizes: Sequence[int], folder: Path | str) -> dict[int, ScratchFile]:
    """Return files for blocks that are trained on disk. All are made before anything moves, to detect a full disk."""
    return {number: ScratchFile(Path(folder), sizes[number]) for number in chosen}


def _choose(rest: int, sizes: Sequence[int], room_bytes: int, place: str) -> list[int]:
    """Return the fewest blocks on the host that leave room for the others, the rest of the module, and the window."""
    ahead = sum(sorted(sizes)[-NUM_AHEAD:])

    def fits(chosen: Collection[int]) -> bool:
        left = sum(size for number, size in enumerate(sizes) if number not in set(chosen))
        return rest + left + (ahead if chosen else 0) <= room_bytes

    found = choose_offloaded(len(sizes), fits)
    if found is None:
        raise ShardwiseError(
            f"no room at {place}: {format_bytes(rest)} outside of the {len(sizes)} blocks and {format_bytes(ahead)} for"
            f" the {NUM_AHEAD} that are being copied are needed, and there are only {format_bytes(room_bytes)}",
            remedy=f"at least {format_bytes(rest + ahead)}",
        )
    return found
