"""The host beside devices: what they have no room for lives there, and its weights come to them ahead of their use.

    cuda:0    units 0..9     4 and 9 only while they are computed, or on their way
    cuda:1    units 10..19   14 and 19 likewise
    cpu       4, 9, 14, 19   weights, gradients, and what the user's optimizer keeps of them

Every device computes its units, layer by layer. This is where placing ends and `runtime/streaming/` begins.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.runtime.placing.layout import NoRoomError, lay_out, no_room
from shardwise.runtime.placing.loads import Load, Loads, trains
from shardwise.runtime.placing.moving import settle
from shardwise.runtime.placing.places import Place
from shardwise.runtime.streaming.block import num_bytes_of
from shardwise.runtime.streaming.disk import Records
from shardwise.runtime.streaming.weights import (
    NUM_AHEAD,
    StreamedWeights,
    find_on_disk,
    own_parameters,
    shared_parameters,
    spread,
)
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit where it is computed. Its own weights may live on the host; the rest of it stays."""

    name: str
    module: nn.Module
    place: Place
    #: With gradients and what an optimizer keeps of them.
    own_bytes: int
    #: Buffers, and weights that others have too.
    fixed_bytes: int
    #: Of its own weights alone: what crosses the link.
    weight_bytes: int
    kept_bytes: int
    is_streamed: bool = False


def divide(places: Sequence[Place], host: str) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places that compute, and those that are memory for them.

    Beside GPUs that is the CPU. Where there are none it is the plain `cpu` beside `cpu:0`, if `host` says so.
    """
    if host == "compute":
        return tuple(places), ()
    if any(place.device.type != "cpu" for place in places):
        memory = tuple(place for place in places if place.device.type == "cpu")
    else:
        memory = tuple(place for place in places if place.name == "cpu" and host == "stream")
    devices = tuple(place for place in places if place not in memory)
    if host == "stream" and not (devices and memory):
        raise ShardwiseError(
            'host="stream" needs a device that computes, and the host beside it',
            remedy='devices=["cuda:0", "cpu"], or without a GPU devices=["cpu:0", "cpu"]',
        )
    return (devices, memory) if memory else (tuple(places), ())


def lay_out_streams(
    module: nn.Module, found: Loads, devices: Sequence[Place], memory: Sequence[Place], *, moments: int
) -> list[Unit]:
    """Where each unit is computed, and which of them are streamed: the fewest that leave room for the others."""
    blocks, loads = found.units, found.by_unit(module, moments=moments)
    places = _computing_places(loads, devices, memory)
    stays = shared_parameters(module, list(blocks.values()))
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    homes: dict[str, Place] = {}  # Of what several units have: it counts once, and they go where it is.
    units = []
    for load, place in zip(loads, places, strict=True):
        [own] = own_parameters([blocks[load.unit]], stays)
        mine = {first_names[parameter] for parameter in own}
        home = next((homes[name] for name in load.states if name in homes), place)
        others = {name for name in load.states if name not in mine and name not in homes}
        homes.update(dict.fromkeys(others, home))
        units.append(
            Unit(
                name=load.unit,
                module=blocks[load.unit],
                place=home,
                own_bytes=sum(load.states[name] for name in mine),
                fixed_bytes=sum(load.states[name] for name in others),
                weight_bytes=num_bytes_of(own),
                kept_bytes=load.kept_bytes,
            )
        )
    copies = 2 if trains(module) else 1  # Weights, and in training their gradients, are on their way.
    streamed: set[str] = set()
    for place in devices:
        here = [unit for unit in units if unit.place is place]
        streamed |= {unit.name for unit in _streamed(place, here, copies)}
    return [replace(unit, is_streamed=unit.name in streamed) for unit in units]


class HostWeights:
    """A module on devices, with what has no room there on the host, or in a folder beside it."""

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], memory: Sequence[Place], folder: Path | str | None = None
    ) -> None:
        machine = Machine(list(dict.fromkeys(unit.place.name for unit in units)))
        weakref.finalize(self, machine.close)
        stays = shared_parameters(module, [unit.module for unit in units])
        streamed = [unit for unit in units if unit.is_streamed]
        own = own_parameters([unit.module for unit in streamed], stays)
        records = _shelved(module, streamed, own, memory, folder)
        self._streamed: StreamedWeights | None = None
        if streamed:
            self._streamed = StreamedWeights(
                [unit.module for unit in streamed],
                machine,
                [unit.place.name for unit in streamed],
                stays=stays,
                records=records,
                wraps=not trains(module),
            )
        places: dict[int, Place] = {id(each): memory[0] for parameters in own for each in parameters}
        for unit in units:
            for each in [*unit.module.parameters(), *unit.module.buffers()]:
                places.setdefault(id(each), unit.place)
        everything = [*module.named_parameters(), *module.named_buffers()]
        #: Where each parameter and buffer lives.
        self.where = {name: places.get(id(each), units[0].place) for name, each in everything}
        #: Where each unit is computed.
        self.devices = {unit.name: unit.place.device for unit in units}
        settle(module, {name: place.device for name, place in self.where.items()})

    @property
    def streamed_bytes(self) -> int:
        """What crosses the links in every pass."""
        return 0 if self._streamed is None else self._streamed.host_bytes + self._streamed.disk_bytes

    def refuse(self, what: str, remedy: str) -> None:
        """What cannot be done with weights that come and go."""
        if self._streamed is not None:
            raise ShardwiseError(
                f"{what} after `place`: {format_bytes(self.streamed_bytes)} of weights are on the host and only pass"
                " through the devices",
                remedy=remedy,
            )


def _computing_places(loads: Sequence[Load], devices: Sequence[Place], memory: Sequence[Place]) -> list[Place]:
    """The device of each unit: runs of them, as even as speeds are. Weights may come and go, activations stay."""
    resting = [replace(load, states={}) for load in loads]
    try:
        runs = lay_out(resting, devices, range(min(len(devices), len(loads))), num_in_flight=1)
    except NoRoomError as error:
        places = [*devices, *memory]
        raise no_room(loads, places, range(len(places)), num_in_flight=1) from error
    return [place for place, run in zip(devices, runs, strict=False) for _ in run]


def _streamed(place: Place, units: Sequence[Unit], copies: int) -> list[Unit]:
    """The fewest units of one device that have to live on the host, as evenly among the others as they go."""
    fixed = sum(unit.fixed_bytes + unit.kept_bytes for unit in units)
    visiting = copies * sum(sorted(unit.weight_bytes for unit in units)[-NUM_AHEAD:])
    room = place.room_bytes - fixed
    if sum(unit.own_bytes for unit in units) <= room:
        return []
    for count in range(1, len(units) + 1):
        chosen = set(spread(len(units), count))
        if sum(unit.own_bytes for number, unit in enumerate(units) if number not in chosen) + visiting <= room:
            return [units[number] for number in sorted(chosen)]
    kept = sum(unit.kept_bytes for unit in units)
    raise NoRoomError(
        f"no room at {place.name}: with all of its {len(units)} units on the host, {format_bytes(kept)} of activations,"
        f" {format_bytes(fixed - kept)} that cannot leave and {format_bytes(visiting)} for the {NUM_AHEAD} units that"
        f" are on their way are needed there, and there are {format_bytes(place.room_bytes)}",
        remedy="a larger budget"
        + (", a smaller batch, or gradient checkpointing, which keeps fewer activations" if kept else ""),
    )


def _shelved(
    module: nn.Module,
    streamed: Sequence[Unit],
    own: Sequence[list[nn.Parameter]],
    memory: Sequence[Place],
    folder: Path | str | None,
) -> dict[int, Records]:
    """Which of the streamed units stay on disk, by number, and where: what the host has no room for."""
    room = sum(place.room_bytes for place in memory)
    needed = sum(unit.own_bytes for unit in streamed)
    if needed <= room:
        return {}
    if trains(module) or folder is None:
        raise NoRoomError(
            f"no room on the host: {format_bytes(needed)} of what the devices have no room for are to live there, and"
            f" there are {format_bytes(room)}",
            remedy="another device, or larger budgets"
            + ("" if trains(module) else ', or folder="..." for what stays on disk'),
        )
    return find_on_disk(module, own, room, folder)
