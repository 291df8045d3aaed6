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
from functools import partial

import torch
from torch import nn

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.placing.activation_share import ActivationShare, hosted_bytes
from shardwise.placing.host import Unit, held_loads, lay_out_streams
from shardwise.placing.layout import NoRoomError, lay_out
from shardwise.placing.loads import Load, ModuleLoads, total_bytes, trains
from shardwise.placing.places import Place, copied_bytes_per_second, matmul_flops, multiplied
from shardwise.units import format_bytes, format_seconds

#: A backward computes twice what its forward does.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make room. `units` are there if weights are streamed, `parts` if activations leave."""

    words: str
    seconds: float
    units: Sequence[Unit] = ()
    share: ActivationShare | None = None
    #: What part of its activations each place sends, and what that is on the host.
    parts: Mapping[Place, float] = field(default_factory=dict)
    hosted_bytes: int = 0
    host_computes: bool = False
    #: Whether weights are read from disk: what that takes is not known, so it is for want of another way.
    reads_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadChoice:
    """The ways that there is room for, the best first, and what each would take."""

    ways: Sequence[Way]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one place does for a batch: FLOPs of its forward; bytes of weights and of activations on its link."""

    place: Place
    cost: float
    weight_bytes: int = 0
    activation_bytes: float = 0.0


class OffloadPrices:
    """What computation and links take, measured when somebody asks for the first time."""

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, *, trains: bool, moments: int) -> None:
        self._first, self._speed, self._dtype = places[0].device, places[0].speed, dtype
        self._trains, self._moments = trains, moments
        self._flops: float | None = None
        self._host_rate: float | None = None
        self._links: dict[str, tuple[Link, Link]] = {}

    def seconds(self, works: Sequence[_Work], *, is_pipelined: bool, on_host_bytes: int = 0) -> float:
        """What a batch takes. The host updates weights of `on_host_bytes`."""
        together = max if is_pipelined else sum
        forward = together([each.cost / self._speed_of(each.place) for each in works])
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
        if self._trains:
            found += max(_BACKWARD * forward, *back_inward, *back_outward)
            # Weights and moments are read and written, gradients read.
            found += (3 + 2 * self._moments) * on_host_bytes / self._rate() if on_host_bytes else 0.0
        return found

    def _speed_of(self, place: Place) -> float:
        if self._flops is None:
            self._flops = matmul_flops(self._first, self._dtype) / self._speed
        return self._flops * place.speed

    def _rate(self) -> float:
        if self._host_rate is None:
            self._host_rate = copied_bytes_per_second()
        return self._host_rate

    def _link(self, device: Place) -> tuple[Link, Link]:
        """In and out, as measured."""
        if device.name not in self._links:
            with Machine([device.name]) as machine:
                links = machine.measure()
            self._links[device.name] = links["host", device.name], links[device.name, "host"]
        return self._links[device.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadQuestion:
    """What is to be placed: devices that compute, and the host beside them."""

    module: nn.Module
    loads: ModuleLoads
    devices: Sequence[Place]
    memory: Sequence[Place]
    moments: int
    is_pipelined: bool
    #: `auto`, `stream` or `compute`.
    host: str
    #: The part of activations that goes to the host, if somebody has said it.
    part: float | None
    #: Whether weights and gradients may be on disk.
    has_folder: bool = False


def decide(question: OffloadQuestion) -> OffloadChoice:
    """The ways that there is room for, the fastest first, those that read a disk last."""
    trained = trains(question.module)
    places, dtype = [*question.devices, *question.memory], multiplied(question.module)
    prices = OffloadPrices(places, dtype, trains=trained, moments=question.moments)
    candidates: list[Callable[[], Way | None]] = [
        partial(find, question, prices, share)
        for share in _shares(question)
        for find in (_with_activations_away, _with_streams)
    ]
    if question.host == "auto":
        candidates.append(partial(_with_host_computing, question, prices))
    found = [_way_or_refusal(find) for find in candidates]
    ways = [each for each in found if isinstance(each, Way)]
    refusals = [each for each in found if isinstance(each, NoRoomError)]
    if not ways:
        raise refusals[-1]
    ways.sort(key=lambda way: (way.reads_disk, way.seconds))
    return OffloadChoice(ways=ways, reason=_reason(question, ways, refusals, prices))


def _shares(question: OffloadQuestion) -> list[ActivationShare | None]:
    """What may be done with activations: leave them where they are (None), or send the part that was asked for."""
    if not trains(question.module) or question.part == 0.0:
        return [None]
    if question.part is None:  # Without an example nobody knows how large they are.
        return [None, ActivationShare()] if question.loads.are_measured else [None]
    return [ActivationShare(part=question.part)]


def _way_or_refusal(find: Callable[[], Way | None]) -> Way | NoRoomError | None:
    """A way, or why there is no room for it; None if it is no other than one of the others."""
    try:
        return find()
    except NoRoomError as error:
        return error


def parts_of(loads: Mapping[Place, Sequence[Load]], share: ActivationShare, num_in_flight: int) -> dict[Place, float]:
    """What part of its activations each place sends."""
    found = {}
    for place, some in loads.items():
        part = share.find_part(some, num_in_flight, place)
        if part is None:
            raise NoRoomError(
                f"no room at {place.name}: {format_bytes(total_bytes(some, num_in_flight))} are needed there,"
                f" {format_bytes(hosted_bytes(share.part or 1.0, some, num_in_flight))} of them activations that may"
                f" be on the host, and there are {format_bytes(place.room_bytes)}",
                remedy="a larger budget, or a smaller batch",
            )
        found[place] = part
    return found


def _with_activations_away(
    question: OffloadQuestion, prices: OffloadPrices, share: ActivationShare | None
) -> Way | None:
    """All weights on the devices."""
    if share is None:
        return None
    calls, devices = question.loads.calls, question.devices
    ranks = range(min(len(devices), len(calls)))
    runs = lay_out(calls, devices, ranks, num_in_flight=1, inseparable=question.loads.inseparable, share=share)
    mine = {place: [calls[call] for call in run] for place, run in zip(devices, runs, strict=False)}
    parts = parts_of(mine, share, 1)
    away = {place: hosted_bytes(parts[place], mine[place], 1) for place in mine}
    check_host(away, 0, _host_room(question))
    works = [
        _Work(place=place, cost=sum(load.cost for load in some), activation_bytes=away[place])
        for place, some in mine.items()
    ]
    return Way(
        words=f"with {_percent(parts)} of the activations on the host",
        seconds=prices.seconds(works, is_pipelined=question.is_pipelined) if question.loads.are_measured else 0.0,
        share=share,
        parts=parts,
        hosted_bytes=int(sum(away.values())),
    )


def _with_streams(question: OffloadQuestion, prices: OffloadPrices, share: ActivationShare | None) -> Way | None:
    """Weights that have no room on the devices come to them; with `share` activations leave, too."""
    loads, trained = question.loads, trains(question.module)
    units = lay_out_streams(
        question.module, loads, question.devices, question.memory, moments=question.moments, share=share
    )
    streamed = [unit for unit in units if unit.is_streamed]
    if not streamed:
        return None
    mine = {place: [unit for unit in units if unit.place is place] for place in question.devices}
    held = {place: held_loads(some, trains=trained) for place, some in mine.items()}
    parts = {} if share is None else parts_of(held, share, 1)
    away = {place: hosted_bytes(part, held[place], 1) for place, part in parts.items()}
    if trained:
        shelved = sum(unit.disk_bytes for unit in streamed) if question.has_folder else 0
        check_host(away, sum(unit.own_bytes for unit in streamed) - shelved, _host_room(question))
    costs = {load.unit: load.cost for load in loads.by_unit(question.module, moments=question.moments)}
    works = [
        _Work(
            place=place,
            cost=sum(costs[unit.name] for unit in some),
            weight_bytes=sum(unit.weight_bytes for unit in some if unit.is_streamed),
            activation_bytes=away.get(place, 0.0),
        )
        for place, some in mine.items()
    ]
    updated = sum(unit.weight_bytes for unit in streamed)
    measured = loads.are_measured
    reads_disk = sum(unit.own_bytes for unit in streamed) + sum(away.values()) > _host_room(question)
    words = f"if streamed{', partly from disk,' if reads_disk else ''}"
    return Way(
        words=f"{words} with {_percent(parts)} of the activations on the host" if parts else words.rstrip(","),
        seconds=prices.seconds(works, is_pipelined=False, on_host_bytes=updated) if measured else 0.0,
        units=units,
        share=share,
        parts=parts,
        hosted_bytes=int(sum(away.values())),
        reads_disk=reads_disk,
    )


def _with_host_computing(question: OffloadQuestion, prices: OffloadPrices) -> Way:
    """The host is a place like the others."""
    places = [*question.devices, *question.memory]
    loads = question.loads
    runs = lay_out(loads.calls, places, range(len(places)), num_in_flight=1, inseparable=loads.inseparable)
    mine = {place: [loads.calls[call] for call in run] for place, run in zip(places, runs, strict=True)}
    works = [_Work(place=place, cost=sum(load.cost for load in some)) for place, some in mine.items()]
    seconds = float("inf")  # Without an example nobody knows.
    if loads.are_measured:
        seconds = prices.seconds(works, is_pipelined=question.is_pipelined)
    return Way(words="if the host computes", seconds=seconds, host_computes=True)


def check_host(away: Mapping[Place, float], state_bytes: int, room_bytes: int) -> None:
    """Refuse what the host has no room for: activations of places, and weights with what belongs to them."""
    if sum(away.values()) + state_bytes <= room_bytes:
        return
    parts = [f"{format_bytes(size)} of activations of {place.name}" for place, size in away.items() if size]
    parts += [f"{format_bytes(state_bytes)} of what the devices have no room for"] if state_bytes else []
    raise NoRoomError(
        f"no room on the host: {' and '.join(parts)} are to live there, and there are {format_bytes(room_bytes)}",
        remedy="another device, or larger budgets"
        + (", a smaller batch, or gradient checkpointing, which keeps fewer activations" if any(away.values()) else ""),
    )


def _host_room(question: OffloadQuestion) -> int:
    return sum(place.room_bytes for place in question.memory)


def _reason(
    question: OffloadQuestion, ways: Sequence[Way], refusals: Sequence[NoRoomError], prices: OffloadPrices
) -> str:
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


def _checkpointed(question: OffloadQuestion, prices: OffloadPrices) -> float | None:
    """What a step would take if every unit were computed again in the backward, and kept nothing but what it is given.

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
