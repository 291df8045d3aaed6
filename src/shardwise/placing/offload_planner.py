"""What has no room on the devices: which of the ways to make room takes the least time.

    weights are streamed      they cross a link twice in training, in the forward and in the backward, and the host
                              updates them
    activations leave         they cross it twice too, out in the forward and back in the backward
    both
    the host computes         and the devices wait for it, unless there are microbatches for them to go on with

Links work beside the computation, both directions at once: a pass takes as long as the longest of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import nn

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.placing.host import Unit, held_loads, lay_out_streams
from shardwise.placing.layout import NoRoomError, find_part, lay_out, offloaded_bytes
from shardwise.placing.loads import Load, ModuleLoads, total_bytes, trains
from shardwise.placing.places import Place, PlaceOptions, copied_bytes_per_second, matmul_flops, multiplied
from shardwise.units import format_bytes, format_seconds

#: A backward computes twice what its forward does.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make room. `units` are there if weights are streamed, `parts` if activations leave."""

    words: str = ""
    seconds: float = 0.0
    units: Sequence[Unit] = ()
    #: What of the activations goes to the host: this part of them, or (None) what there is no room for.
    part: float | None = 0.0
    #: What part of its activations each place sends, and what that is on the host.
    parts: Mapping[Place, float] = field(default_factory=dict)
    offloaded_bytes: int = 0
    host_computes: bool = False
    #: Whether weights are read from disk: the time of that is unknown, so it is the last resort.
    reads_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadQuestion:
    """What is to be placed: devices that compute, and the host beside them."""

    module: nn.Module
    loads: ModuleLoads
    devices: Sequence[Place]
    memory: Sequence[Place]
    options: PlaceOptions

    @property
    def is_pipelined(self) -> bool:
        """Whether devices compute at the same time. One beside the host goes layer by layer."""
        return self.options.microbatches > 1 and len(self.devices) > 1

    @property
    def room_bytes(self) -> int:
        """What the host has room for."""
        return sum(place.room_bytes for place in self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one place does for a batch: FLOPs of its forward; bytes of weights and of activations on its link."""

    place: Place
    cost: float
    weight_bytes: int = 0
    activation_bytes: float = 0.0


class _Prices:
    """The times of computation and links, measured on first use."""

    def __init__(self, question: OffloadQuestion) -> None:
        self._question = question
        self._links: dict[str, tuple[Link, Link]] = {}

    def seconds(self, works: Sequence[_Work], *, is_pipelined: bool, on_host_bytes: int = 0) -> float:
        """Return the time of a batch. The host updates weights of `on_host_bytes`."""
        together = max if is_pipelined else sum
        forward = together([each.cost / (self._flops * each.place.speed) for each in works])
        inward, outward = [0.0], [0.0]
        back_inward, back_outward = [0.0], [0.0]
        for each in works:
            if each.weight_bytes or each.activation_bytes:
                come, go = self._link(each.place)
                inward.append(each.weight_bytes / come.bytes_per_second)
                outward.append(each.activation_bytes / go.bytes_per_second)
                back_inward.append((each.weight_bytes + each.activation_bytes) / come.bytes_per_second)
                back_outward.append(each.weight_bytes / go.bytes_per_second)
        found = max(forward, *inward, *outward)
        if trains(self._question.module):
            found += max(_BACKWARD * forward, *back_inward, *back_outward)
            # Weights and moments are read and written, gradients read.
            moved = (3 + 2 * self._question.options.moments) * on_host_bytes
            found += moved / self._host_rate if on_host_bytes else 0.0
        return found

    @cached_property
    def _flops(self) -> float:
        """FLOPs a second of a device of speed 1."""
        first = self._question.devices[0]
        return matmul_flops(first.device, multiplied(self._question.module)) / first.speed

    @cached_property
    def _host_rate(self) -> float:
        return copied_bytes_per_second()

    def _link(self, device: Place) -> tuple[Link, Link]:
        """The bandwidths in and out, as measured."""
        if device.name not in self._links:
            with Machine([device.name]) as machine:
                links = machine.measure()
            self._links[device.name] = links["host", device.name], links[device.name, "host"]
        return self._links[device.name]


def decide(question: OffloadQuestion) -> tuple[Sequence[Way], str]:
    """Return the ways that fit, the fastest first, those that read a disk last; and the time of each."""
    prices = _Prices(question)
    candidates: list[Callable[[], Way | None]] = []
    for part in _parts_to_try(question):
        if part != 0.0:
            candidates.append(partial(_with_activations_offloaded, question, prices, part))
        candidates.append(partial(_with_streams, question, prices, part))
    if question.options.host == "auto":
        candidates.append(partial(_with_host_computing, question, prices))
    ways: list[Way] = []
    refusals: list[NoRoomError] = []
    for find in candidates:
        try:
            way = find()
        except NoRoomError as error:
            refusals.append(error)
        else:
            ways += [way] if way is not None else []
    if not ways:
        raise refusals[-1]
    ways.sort(key=lambda way: (way.reads_disk, way.seconds))
    return ways, _reason(question, ways, refusals, prices)


def _parts_to_try(question: OffloadQuestion) -> list[float | None]:
    """Return the shares of activations to try: none (0), the requested share, or (None) as much as does not fit."""
    asked = question.options.activations_on_host
    if not trains(question.module) or asked == 0.0:
        return [0.0]
    if asked is None:  # Without an example their size is unknown.
        return [0.0, None] if question.loads.are_measured else [0.0]
    return [asked]


def parts_of(loads: Mapping[Place, Sequence[Load]], part: float | None, num_in_flight: int) -> dict[Place, float]:
    """Return the share of activations that each place offloads."""
    found = {}
    for place, some in loads.items():
        sent = find_part(part, some, num_in_flight, place)
        if sent is None:
            raise NoRoomError(
                f"no room at {place.name}: {format_bytes(total_bytes(some, num_in_flight))} are needed there,"
                f" {format_bytes(offloaded_bytes(part or 1.0, some, num_in_flight))} of them activations that may"
                f" be on the host, and there are {format_bytes(place.room_bytes)}",
                remedy="a larger budget, or a smaller batch",
            )
        found[place] = sent
    return found


def _with_activations_offloaded(question: OffloadQuestion, prices: _Prices, part: float | None) -> Way:
    """Return the way with all weights on the devices."""
    loads, devices = question.loads, question.devices
    ranks = range(min(len(devices), len(loads.calls)))
    runs = lay_out(loads.calls, devices, ranks, num_in_flight=1, inseparable=loads.inseparable, part=part)
    mine = {place: [loads.calls[call] for call in run] for place, run in zip(devices, runs, strict=False)}
    parts = parts_of(mine, part, 1)
    offloaded = {place: offloaded_bytes(parts[place], mine[place], 1) for place in mine}
    check_host(offloaded, 0, question.room_bytes)
    works = [
        _Work(place=place, cost=sum(load.cost for load in some), activation_bytes=offloaded[place])
        for place, some in mine.items()
    ]
    return Way(
        words=f"with {_percent(parts)} of the activations on the host",
        seconds=prices.seconds(works, is_pipelined=question.is_pipelined) if loads.are_measured else 0.0,
        part=part,
        parts=parts,
        offloaded_bytes=int(sum(offloaded.values())),
    )


def _with_streams(question: OffloadQuestion, prices: _Prices, part: float | None) -> Way | None:
    """Stream weights that do not fit on the devices; unless `part` is 0, offload activations too."""
    loads, trained = question.loads, trains(question.module)
    units = lay_out_streams(
        question.module, loads, question.devices, question.memory, moments=question.options.moments, part=part
    )
    streamed = [unit for unit in units if unit.is_streamed]
    if not streamed:
        return None
    mine = {place: [unit for unit in units if unit.place is place] for place in question.devices}
    held = {place: held_loads(some, trains=trained) for place, some in mine.items()}
    parts = {} if part == 0.0 else parts_of(held, part, 1)
    offloaded = {place: offloaded_bytes(each, held[place], 1) for place, each in parts.items()}
    own_bytes = sum(unit.own_bytes for unit in streamed)
    if trained:
        on_disk = sum(unit.disk_bytes for unit in streamed) if question.options.folder is not None else 0
        check_host(offloaded, own_bytes - on_disk, question.room_bytes)
    works = [
        _Work(
            place=place,
            cost=sum(unit.load.cost for unit in some),
            weight_bytes=sum(unit.weight_bytes for unit in some if unit.is_streamed),
            activation_bytes=offloaded.get(place, 0.0),
        )
        for place, some in mine.items()
    ]
    updated = sum(unit.weight_bytes for unit in streamed)
    reads_disk = own_bytes + sum(offloaded.values()) > question.room_bytes
    words = f"if streamed{', partly from disk,' if reads_disk else ''}"
    return Way(
        words=f"{words} with {_percent(parts)} of the activations on the host" if parts else words.rstrip(","),
        seconds=prices.seconds(works, is_pipelined=False, on_host_bytes=updated) if loads.are_measured else 0.0,
        units=units,
        part=part,
        parts=parts,
        offloaded_bytes=int(sum(offloaded.values())),
        reads_disk=reads_disk,
    )


def _with_host_computing(question: OffloadQuestion, prices: _Prices) -> Way:
    """Return the way with the host as a place like the others."""
    places, loads = [*question.devices, *question.memory], question.loads
    runs = lay_out(loads.calls, places, range(len(places)), num_in_flight=1, inseparable=loads.inseparable)
    works = [
        _Work(place=place, cost=sum(loads.calls[call].cost for call in run))
        for place, run in zip(places, runs, strict=True)
    ]
    seconds = float("inf")  # Unknown without an example.
    if loads.are_measured:
        seconds = prices.seconds(works, is_pipelined=question.is_pipelined)
    return Way(words="if the host computes", seconds=seconds, host_computes=True)


def check_host(offloaded: Mapping[Place, float], state_bytes: int, room_bytes: int) -> None:
    """Refuse what the host has no room for: activations of places, and weights with what belongs to them."""
    if sum(offloaded.values()) + state_bytes <= room_bytes:
        return
    parts = [f"{format_bytes(size)} of activations of {place.name}" for place, size in offloaded.items() if size]
    parts += [f"{format_bytes(state_bytes)} of what the devices have no room for"] if state_bytes else []
    less = ", a smaller batch, or gradient checkpointing, which keeps fewer activations"
    raise NoRoomError(
        f"no room on the host: {' and '.join(parts)} would go there, but only {format_bytes(room_bytes)} are available",
        remedy="another device, or larger budgets" + (less if any(offloaded.values()) else ""),
    )


def _reason(question: OffloadQuestion, ways: Sequence[Way], refusals: Sequence[NoRoomError], prices: _Prices) -> str:
    if not question.loads.are_measured:
        return f"{ways[0].words}: no example= says how long the host would compute"
    unit = "step" if trains(question.module) else "pass"
    found = ", ".join(f"{format_seconds(way.seconds)} a {unit} {way.words}" for way in ways)
    if len(ways) == 1 and refusals:
        found += f"; nothing else has room: {refusals[0].problem}"
    again = _checkpointed(question, prices)
    if again is not None and again < ways[0].seconds:
        found += f"; gradient checkpointing would take {format_seconds(again)}"
    return found


def _checkpointed(question: OffloadQuestion, prices: _Prices) -> float | None:
    """Return the time of a step with every unit recomputed in the backward, keeping only its inputs.

    None if that has no room, or would keep about as much.
    """
    calls, devices = question.loads.calls, question.devices
    kept, given = sum(load.kept_bytes for load in calls), sum(load.given_bytes for load in calls)
    states = total_bytes([*calls], 0)
    room = sum(place.room_bytes for place in devices)
    at_work = max(load.kept_bytes for load in calls)
    if not trains(question.module) or 2 * given > kept or states + given + at_work > room:
        return None
    cost = sum(load.cost for load in calls) / sum(place.speed for place in devices)
    works = [_Work(place=place, cost=(4 / 3) * cost * place.speed) for place in devices]
    return prices.seconds(works, is_pipelined=question.is_pipelined)


def _percent(parts: Mapping[Place, float]) -> str:
    found = sorted({round(100 * part) for part in parts.values()})
    return f"{found[0]} %" if len(found) == 1 else f"{found[0]} to {found[-1]} %"
