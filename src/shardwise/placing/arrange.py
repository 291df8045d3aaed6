"""Where everything of a placed module goes: the first way that there is room for.

    everything on the devices           in stages of a pipeline if there are microbatches, else layer by layer
        |  no room, and the host is there too
    what the offload planner offers     the fastest first: activations on the host, weights streamed from it, both,
                                        or the host computes like another device

The planner counts single units. Stages are runs of them, so a way of its may turn out to have no room: then it is the
next one's turn. That is the only choice made here; which way is fastest is decided in `offload_planner.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.execution.pipeline import schedule_of
from shardwise.placing.activation_offload import PlacedActivationOffload
from shardwise.placing.activation_share import ActivationShare, hosted_bytes
from shardwise.placing.batch_rows import cut_rows, home_of, rows_of
from shardwise.placing.device_moves import moved
from shardwise.placing.host import HostWeights, divide
from shardwise.placing.layout import NoRoomError, by_rank, fits, lay_out
from shardwise.placing.loads import Load, find_loads, loads_of, trains
from shardwise.placing.moving import settle
from shardwise.placing.offload_planner import OffloadQuestion, Way, check_host, decide, parts_of
from shardwise.placing.pipeline import Pipeline
from shardwise.placing.places import Place
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.stages.split import split
from shardwise.stages.split.choose import Chosen, SplitOptions, choose
from shardwise.stages.split.parts import inseparable_calls
from shardwise.stages.stage import Batch, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """How a module is to be placed."""

    microbatches: int
    schedule: str
    chunks: int | None
    moments: int
    through_blocks: bool
    host: str = "auto"
    folder: Path | str | None = None
    #: The part of activations on the host; None is what there is no room for.
    activations_on_host: float | None = None

    def make_schedule(self, num_places: int, count: int) -> Schedule:
        """The schedule for so many microbatches, computation only."""
        plan = Plan(pp=num_places, microbatches=count, schedule=self.schedule, chunks=self.chunks)
        return schedule_of(plan)


@dataclass(slots=True, kw_only=True)
class Arrangement:
    """Where everything is. `units` are those that inputs have to be brought to, and their devices."""

    where: dict[str, Place] = field(default_factory=dict)
    units: dict[str, torch.device] = field(default_factory=dict)
    #: Why the host is used as it is, where it had to be.
    reason: str = ""
    #: The part of the activations that is on the host, if any is.
    activations: PlacedActivationOffload | None = None
    host: HostWeights | None = None
    pipeline: Pipeline | None = None
    #: Whatever the number of microbatches.
    is_by_layers: bool = False


def arrange(module: nn.Module, places: Sequence[Place], options: PlaceOptions, example: Batch | None) -> Arrangement:
    """Decide where everything goes, from a batch if there is one, and bring it there."""
    task = _Task(module, places, options, example)
    refusal: NoRoomError | None = None
    for way in task.ways():
        try:
            return task.go(way)
        except NoRoomError as error:
            refusal = error
    assert refusal is not None, "there is always a first way"
    raise refusal


class _Task:
    """One module to be placed: the ways to do it, and how to go each."""

    def __init__(
        self, module: nn.Module, places: Sequence[Place], options: PlaceOptions, example: Batch | None
    ) -> None:
        self._module, self._places, self._options, self._example = module, places, options, example
        self._devices, self._memory = divide(places, options.host)
        # One device beside the host goes layer by layer: there is nobody else to be kept busy.
        self._is_alone = bool(self._memory) and len(self._devices) == 1
        self._made = Arrangement()
        self._reason = ""

    def ways(self) -> Iterator[Way]:
        """The ways to make room, in the order in which they are tried. The planner is asked when it is its turn."""
        part = self._options.activations_on_host
        yield Way(words="", seconds=0.0, share=ActivationShare(part=part) if part else None)
        if self._memory:
            choice = decide(self._question())
            self._reason = choice.reason
            yield from choice.ways

    def go(self, way: Way) -> Arrangement:
        """Make room in one of the ways."""
        self._made = Arrangement(reason=self._reason)
        if way.units:
            self._stream(way)
        else:
            places = self._places if way.host_computes else self._devices
            is_alone = self._is_alone and not way.host_computes
            self._fill(places, way.share, is_alone=is_alone)
        return self._made

    def _question(self) -> OffloadQuestion:
        options = self._options
        return OffloadQuestion(
            module=self._module,
            loads=find_loads(self._module, self._example_at_home(), moments=options.moments),
            devices=self._devices,
            memory=self._memory,
            moments=options.moments,
            is_pipelined=options.microbatches > 1 and not self._is_alone,
            host=options.host,
            part=options.activations_on_host,
            has_folder=options.folder is not None,
        )

    def _stream(self, way: Way) -> None:
        """Not everything fits on the devices: the rest comes to them from the host."""
        made, options = self._made, self._options
        room = sum(place.room_bytes for place in self._memory)
        host = HostWeights(self._module, way.units, room - way.hosted_bytes, self._memory[0], options.folder)
        made.host, made.where, made.units, made.is_by_layers = host, host.where, host.devices, True
        # A module that is to be trained later sends what was asked for.
        parts = way.parts or dict.fromkeys(self._devices, options.activations_on_host or 0.0)
        made.activations = (
            PlacedActivationOffload(parts, max(0, room - host.host_bytes)) if any(parts.values()) else None
        )

    def _fill(self, places: Sequence[Place], share: ActivationShare | None, *, is_alone: bool) -> None:
        """Put everything on some of the places, each of which computes what it has."""
        share = share if trains(self._module) else None
        if self._example is not None and self._options.microbatches > 1 and not is_alone:
            where = self._fill_stages(places, self._example, share)
        else:
            where = self._fill_units(places, share)
        self._made.is_by_layers = is_alone
        self._made.where = {name: where.get(name, places[0]) for name in _names(self._module)}
        settle(self._module, {name: place.device for name, place in self._made.where.items()})

    def _fill_units(self, places: Sequence[Place], share: ActivationShare | None) -> dict[str, Place]:
        """Layer by layer: runs of units, and those that share a weight on one place."""
        found = find_loads(self._module, self._example_at_home(), moments=self._options.moments)
        loads = found.calls
        ranks = range(min(len(places), len(loads)))
        stages = lay_out(loads, places, ranks, num_in_flight=1, inseparable=found.inseparable, share=share)
        self._send_activations([[loads[call] for call in calls] for calls in stages], places, share, 1)
        where: dict[str, Place] = {}
        for place, calls in zip(places, stages, strict=False):
            for load in (loads[call] for call in calls):
                shared = next((where[name] for name in load.states if name in where), place)
                self._made.units.setdefault(load.unit, shared.device)
                where.update({name: where.get(name, shared) for name in load.states})
        return where

    def _fill_stages(self, places: Sequence[Place], batch: Batch, share: ActivationShare | None) -> dict[str, Place]:
        """In a pipeline: the stages of the schedule, cut where they are even, or where there is room."""
        module, options = self._module, self._options
        microbatches = cut_rows(batch, min(options.microbatches, rows_of(batch)))
        example = _at_home(microbatches[0], module)
        ranks = _one_of_each(options.make_schedule(len(places), options.microbatches), options.schedule)
        speeds = [places[rank].speed / ranks.count(rank) for rank in ranks]
        even = choose(module, example, _split_options(speeds, through_blocks=options.through_blocks))
        loads = self._loads(even, example)
        held = [[loads[call] for call in calls] for calls in even[2]]
        cut: list[str] | None = None
        if not fits(held, places, ranks, num_in_flight=options.microbatches, share=share):
            whole = choose(module, example, _split_options(speeds))
            loads, pairs = self._loads(whole, example), inseparable_calls(whole[1])
            stages = lay_out(loads, places, ranks, num_in_flight=options.microbatches, inseparable=pairs, share=share)
            cut = [whole[1].calls[calls.start].name for calls in stages]
            held = [[loads[call] for call in calls] for calls in stages]
        self._send_activations(by_rank(held, ranks, len(places)), places, share, options.microbatches)
        through = options.through_blocks and cut is None
        found = split(module, len(ranks), example, cut=cut, speeds=speeds, through_blocks=through)
        self._made.pipeline = Pipeline(
            module,
            found,
            places,
            num_microbatches=options.microbatches,
            make_schedule=lambda count: options.make_schedule(len(places), count),
            activations=self._made.activations,
        )
        for names, rank in zip(found.units, ranks, strict=True):
            self._made.units |= {unit.partition("#")[0]: places[rank].device for unit in names}
        return _owners(found, [places[rank] for rank in ranks])

    def _loads(self, chosen: Chosen, example: Batch) -> list[Load]:
        units, flow, _ = chosen
        return loads_of(self._module, units, flow, example, moments=self._options.moments)

    def _send_activations(
        self, held: Sequence[Sequence[Load]], places: Sequence[Place], share: ActivationShare | None, num_in_flight: int
    ) -> None:
        """Have places send the part of their activations that there is no room for, or that was asked for."""
        room = sum(place.room_bytes for place in self._memory) if self._memory else None
        # A module that is to be trained later sends what was asked for. Its activations are not known by now.
        parts = dict.fromkeys(places, self._options.activations_on_host or 0.0)
        if share is not None:
            mine = dict(zip(places, held, strict=False))
            parts = parts_of(mine, share, num_in_flight)
            away = {place: hosted_bytes(part, mine[place], num_in_flight) for place, part in parts.items()}
            check_host(away, 0, available_bytes() if room is None else room)
        if any(place.device.type != "cpu" for place in places):
            parts = {place: part for place, part in parts.items() if place.device.type != "cpu"}
        self._made.activations = PlacedActivationOffload(parts, room) if any(parts.values()) else None

    def _example_at_home(self) -> Batch | None:
        return None if self._example is None else _at_home(self._example, self._module)


def _one_of_each(schedule: Schedule, name: str) -> Sequence[int]:
    """The place of each stage; schedules that hold the weights twice are refused."""
    if len(schedule.placement.pipes) > 1 or schedule.staleness:
        raise ShardwiseError(
            f"{name} holds the weights twice, and a placed module has one of each", remedy='schedule="zb-v"'
        )
    return schedule.placement.ranks


def _split_options(speeds: Sequence[float], *, through_blocks: bool = False) -> SplitOptions:
    return SplitOptions(
        num_stages=len(speeds), cut=None, costs=None, speeds=speeds, limit_bytes=None, through_blocks=through_blocks
    )


def _owners(found: Split, places: Sequence[Place]) -> dict[str, Place]:
    """The place of each parameter and buffer: that of the first stage that holds it."""
    where: dict[str, Place] = {}
    for stage, place in zip(found.stages, places, strict=True):
        assert stage is not None, "all stages are in this process"
        for name in (*stage.parameters, *stage.buffers):
            where.setdefault(name, place)
    return where


def _at_home(example: Batch, module: nn.Module) -> Batch:
    """A batch where the module's weights are before they are placed."""
    home = next((each.device for each in module.parameters()), home_of(example))
    return {name: moved(each, home) for name, each in example.items()}


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
