"""The host beside devices: units that do not fit live there, and their weights are prefetched to the devices.

    cuda:0    units 0..9     4 and 9 only while they are computed, or in transit
    cuda:1    units 10..19   14 and 19 likewise
    cpu       4, 9, 14, 19   weights, gradients, and their state in the user's optimizer

Every device computes its units, layer by layer. This is where placing ends and `states/tiers/` begins.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.placing.layout import NoRoomError, lay_out, least_bytes, no_room, window_bytes
from shardwise.placing.loads import Load, ModuleLoads, trains
from shardwise.placing.moving import settle
from shardwise.placing.places import Place
from shardwise.states.tiers.choose_offloaded import choose_for_room, choose_offloaded
from shardwise.states.tiers.disk import Records
from shardwise.states.tiers.streamed_block import ScratchFile, num_bytes_of
from shardwise.states.tiers.streamed_weights import NUM_AHEAD, StreamedWeights, own_parameters, shared_parameters
from shardwise.states.tiers.streaming import find_on_disk, make_scratches
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit on the place that computes it. Its own weights may live on the host; the rest stays on the device."""

    load: Load
    module: nn.Module
    place: Place
    #: With gradients and optimizer state.
    own_bytes: int
    #: Buffers, and weights shared with other units.
    fixed_bytes: int
    #: Of its own weights alone: what crosses the link.
    weight_bytes: int
    #: The part of `own_bytes` that may be on disk: weights and gradients. Optimizer state is in memory.
    disk_bytes: int
    is_streamed: bool = False

    @property
    def name(self) -> str:
        return self.load.unit

    @property
    def held(self) -> Load:
        """The memory that it needs at its place, except for units in transit."""
        states = {self.name: self.fixed_bytes + (0 if self.is_streamed else self.own_bytes)}
        return replace(self.load, states=states)


def divide(places: Sequence[Place], host: str) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the places that compute, and those that only provide memory for them.

    Beside GPUs the latter is the CPU. Without GPUs it is the plain `cpu` beside `cpu:0`, if `host` says so.
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
    module: nn.Module,
    found: ModuleLoads,
    devices: Sequence[Place],
    memory: Sequence[Place],
    *,
    moments: int,
    part: float | None = 0.0,
) -> list[Unit]:
    """Return the device of each unit, and which of them are streamed: the fewest that leave room for the others."""
    blocks, loads = found.units, found.by_unit(module, moments=moments)
    places = _computing_places(loads, devices, memory, part)
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
                load=load,
                module=blocks[load.unit],
                place=home,
                own_bytes=sum(load.states[name] for name in mine),
                fixed_bytes=sum(load.states[name] for name in others),
                weight_bytes=num_bytes_of(own),
                disk_bytes=sum(each.nbytes * (2 if trains(module) and each.requires_grad else 1) for each in own),
            )
        )
    by_name = {}
    for place in devices:
        here = [unit for unit in units if unit.place is place]
        by_name.update({unit.name: unit for unit in _with_streams(place, here, part, trains=trains(module))})
    return [by_name[unit.name] for unit in units]


def held_loads(units: Sequence[Unit], *, trains: bool) -> list[Load]:
    """Return the memory that units of one place need there, including those in transit."""
    return [*(unit.held for unit in units), _on_their_way(units, trains=trains)]


def _on_their_way(units: Sequence[Unit], *, trains: bool) -> Load:
    """Return the weights, and in training their gradients, of as many units as are in transit."""
    largest = sorted(unit.weight_bytes for unit in units)[-NUM_AHEAD:]
    num_bytes = (2 if trains else 1) * sum(largest) if any(each.is_streamed for each in units) else 0
    return Load(unit="on its way", cost=0.0, states={"on its way": num_bytes}, kept_bytes=0)


class HostWeights:
    """A module on devices; units that do not fit are on the host, or in a folder. At least one unit is streamed."""

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], room_bytes: int, memory: Place, folder: Path | str | None = None
    ) -> None:
        machine = Machine(list(dict.fromkeys(unit.place.name for unit in units)))
        weakref.finalize(self, machine.close)
        stays = shared_parameters(module, [unit.module for unit in units])
        streamed = [unit for unit in units if unit.is_streamed]
        own = own_parameters([unit.module for unit in streamed], stays)
        records, scratches = _on_disk(module, streamed, own, room_bytes, folder)
        #: What is in the host's memory of streamed units, with gradients and what an optimizer keeps.
        self.host_bytes = sum(unit.own_bytes for unit in streamed) - sum(
            streamed[number].disk_bytes for number in (*records, *scratches)
        )
        self._streamed = StreamedWeights(
            [unit.module for unit in streamed],
            machine,
            [unit.place.name for unit in streamed],
            stays=stays,
            records=records,
            scratches=scratches,
            wraps=not trains(module),
        )
        places: dict[int, Place] = {id(each): memory for parameters in own for each in parameters}
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
    def swapped(self) -> list[Tensor]:
        """Memory on the devices that weights come to and leave again."""
        return self._streamed.swapped

    def refuse(self, what: str, remedy: str) -> None:
        """What cannot be done with weights that come and go."""
        num_bytes = self._streamed.host_bytes + self._streamed.disk_bytes
        raise ShardwiseError(
            f"{what} after `place`: {format_bytes(num_bytes)} of weights are on the host and only pass through the"
            " devices",
            remedy=remedy,
        )


def _computing_places(
    loads: Sequence[Load], devices: Sequence[Place], memory: Sequence[Place], part: float | None
) -> list[Place]:
    """Return the device of each unit: runs of units, divided by the devices' speeds. Weights may be streamed."""
    resting = [replace(load, states={}) for load in loads]
    try:
        runs = lay_out(resting, devices, range(min(len(devices), len(loads))), num_in_flight=1, part=part)
    except NoRoomError as error:
        places = [*devices, *memory]
        raise no_room(loads, places, range(len(places)), num_in_flight=1, part=part) from error
    return [place for place, run in zip(devices, runs, strict=False) for _ in run]


def _with_streams(place: Place, units: Sequence[Unit], part: float | None, *, trains: bool) -> list[Unit]:
    """Return the units of one device, with the fewest of them on the host, spread as evenly as possible."""

    def streaming(chosen: Collection[int]) -> list[Unit]:
        return [replace(unit, is_streamed=number in chosen) for number, unit in enumerate(units)]

    def needed(some: Sequence[Unit]) -> float:
        return least_bytes(part, held_loads(some, trains=trains), 1, window_bytes(place))

    found = choose_offloaded(len(units), lambda chosen: needed(streaming(chosen)) <= place.room_bytes)
    if found is not None:
        return streaming(found)
    every = streaming(range(len(units)))
    fixed, coming = sum(unit.fixed_bytes for unit in units), sum(_on_their_way(every, trains=trains).states.values())
    kept = needed(every) - fixed - coming
    raise NoRoomError(
        f"no room at {place.name}: with all of its {len(units)} units on the host, {format_bytes(kept)} of activations,"
        f" {format_bytes(fixed)} that cannot leave and {format_bytes(coming)} for the {NUM_AHEAD} units that"
        f" are on their way are needed there, and there are {format_bytes(place.room_bytes)}",
        remedy="a larger budget"
        + (", a smaller batch, or gradient checkpointing, which keeps fewer activations" if kept else ""),
    )


def _on_disk(
    module: nn.Module,
    streamed: Sequence[Unit],
    own: Sequence[list[nn.Parameter]],
    room: int,
    folder: Path | str | None,
) -> tuple[Mapping[int, Records], Mapping[int, ScratchFile]]:
    """Return the streamed units on disk, by number: those that do not fit on the host.

    First where those are read from that are not trained, then files for those that are.
    """
    sizes = [unit.own_bytes for unit in streamed]
    if sum(sizes) <= room:
        return {}, {}
    chosen = None
    if folder is not None:
        chosen = choose_for_room(sizes, [unit.own_bytes - unit.disk_bytes for unit in streamed], room)
    if chosen is None or folder is None:
        what = "of what the devices have no room for are to live there"
        if folder is not None:
            kept = sum(unit.own_bytes - unit.disk_bytes for unit in streamed)
            what += f" ({format_bytes(kept)} with weights and gradients on disk)"
        raise NoRoomError(
            f"no room on the host: {format_bytes(sum(sizes))} {what}, and there are {format_bytes(room)}",
            remedy="another device, or larger budgets"
            + (', or folder="..." for what stays on disk' if folder is None else ", or fewer moments="),
        )
    if not trains(module):
        return find_on_disk(module, own, room, folder), {}
    return {}, make_scratches(chosen, [num_bytes_of(each) for each in own], folder)
