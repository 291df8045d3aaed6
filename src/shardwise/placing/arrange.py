"""Decide where everything of a placed module goes: the first way that fits.

    everything on the devices           in stages of a pipeline if there are microbatches, else layer by layer
        |  no room, and the host is there too
    what the offload planner offers     the fastest first: activations on the host, weights streamed from it, both,
                                        or the host computes like another device

The planner counts single units. Stages are runs of units, so one of its ways may turn out not to fit: then the next is
tried. That is the only choice made here; `offload_planner.py` decides which way is fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from shardwise.cluster.local import available_bytes
from shardwise.placing.activation_offload import PlacedActivationOffload
from shardwise.placing.batch_rows import cut_rows, home_of, rows_of
from shardwise.placing.host import HostWeights, divide
from shardwise.placing.layout import NoRoomError, lay_out, least_bytes, offloaded_bytes, window_bytes
from shardwise.placing.loads import Load, ModuleLoads, find_loads, loads_of, trains
from shardwise.placing.moving import moved, settle
from shardwise.placing.offload_planner import OffloadQuestion, Way, check_host, decide, parts_of
from shardwise.placing.pipeline import Pipeline, make_schedule
from shardwise.placing.places import Place, PlaceOptions
from shardwise.stages.split import split
from shardwise.stages.split.choose import Chosen, SplitOptions, choose
from shardwise.stages.split.parts import inseparable_calls
from shardwise.stages.split.second_batch import second_batch
from shardwise.stages.stage import Batch, Second, Split


@dataclass(slots=True, kw_only=True)
class Arrangement:
    """Where everything is. `units` are those that inputs have to be brought to, and their devices."""

    where: dict[str, Place] = field(default_factory=dict)
    units: dict[str, torch.device] = field(default_factory=dict)
    #: Why the host is used as it is, if it had to be.
    reason: str = ""
    #: The fraction of the activations that is on the host, if any.
    activations: PlacedActivationOffload | None = None
    host: HostWeights | None = None
    pipeline: Pipeline | None = None
    #: Whatever the number of microbatches.
    is_by_layers: bool = False


def arrange(module: nn.Module, places: Sequence[Place], options: PlaceOptions, example: Batch | None) -> Arrangement:
    """Decide where everything goes, using a batch if there is one, and move it there."""
    task = _Task(module, places, options, example)
    refusal: NoRoomError | None = None
    for way, reason in task.ways():
        try:
            return task.go(way, reason)
        except NoRoomError as error:
            refusal = error
    assert refusal is not None, "there is always a first way"
    raise refusal


class _Task:
    """One module to be placed: the ways to do it, and how to carry out each."""

    def __init__(
        self, module: nn.Module, places: Sequence[Place], options: PlaceOptions, example: Batch | None
    ) -> None:
        self._module, self._places, self._options, self._example = module, places, options, example
        self._devices, self._memory = divide(places, options.host)
        # One device beside the host runs layer by layer: a pipeline would have no second device to keep busy.
        self._is_alone = bool(self._memory) and len(self._devices) == 1

    def ways(self) -> Iterator[tuple[Way, str]]:
        """Yield the ways to save memory, in the order in which they are tried, with the reason.

        The planner is asked when it is its turn.
        """
        yield Way(part=self._options.activations_on_host or 0.0), ""
        if self._memory:
            question = OffloadQuestion(
                module=self._module,
                loads=self._loads,
                devices=self._devices,
                memory=self._memory,
                options=self._options,
            )
            ways, reason = decide(question)
            yield from ((way, reason) for way in ways)

    def go(self, way: Way, reason: str) -> Arrangement:
        """Make room in one of the ways."""
        made = Arrangement(reason=reason)
        if way.units:
            self._stream(way, made)
        else:
            self._fill(way, made)
        return made

    @cached_property
    def _loads(self) -> ModuleLoads:
        """The loads of the module, measured before anything of it is moved."""
        example = None if self._example is None else _at_home(self._example, self._module)
        return find_loads(self._module, example, moments=self._options.moments)

    def _stream(self, way: Way, made: Arrangement) -> None:
        """Stream from the host what does not fit on the devices."""
        options = self._options
        room = sum(place.room_bytes for place in self._memory)
        host = HostWeights(self._module, way.units, room - way.offloaded_bytes, self._memory[0], options.folder)
        made.host, made.where, made.units, made.is_by_layers = host, host.where, host.devices, True
        # A module that is to be trained later sends what was asked for.
        parts = way.parts or dict.fromkeys(self._devices, options.activations_on_host or 0.0)
        if any(parts.values()):
            made.activations = PlacedActivationOffload(parts, max(0, room - host.host_bytes))

    def _fill(self, way: Way, made: Arrangement) -> None:
        """Put everything on some of the places, each of which computes what it has."""
        places = self._places if way.host_computes else self._devices
        part = way.part if trains(self._module) else 0.0
        made.is_by_layers = self._is_alone and not way.host_computes
        if self._example is not None and self._options.microbatches > 1 and not made.is_by_layers:
            where = self._fill_stages(places, self._example, part, made)
        else:
            where = self._fill_units(places, part, made)
        everything = [*self._module.named_parameters(), *self._module.named_buffers()]
        made.where = {name: where.get(name, places[0]) for name, _ in everything}
        settle(self._module, {name: place.device for name, place in made.where.items()})

    def _fill_units(self, places: Sequence[Place], part: float | None, made: Arrangement) -> dict[str, Place]:
        """Layer by layer: runs of units, and those that share a weight on one place."""
        loads, pairs = self._loads.calls, self._loads.inseparable
        ranks = range(min(len(places), len(loads)))
        runs = lay_out(loads, places, ranks, num_in_flight=1, inseparable=pairs, part=part)
        stages = [[loads[call] for call in calls] for calls in runs]
        made.activations = self._offloaded(stages, places, part, 1)
        where: dict[str, Place] = {}
        for place, stage in zip(places, stages, strict=False):
            for load in stage:
                shared = next((where[name] for name in load.states if name in where), place)
                made.units.setdefault(load.unit, shared.device)
                where.update({name: where.get(name, shared) for name in load.states})
        return where

    def _fill_stages(
        self, places: Sequence[Place], batch: Batch, part: float | None, made: Arrangement
    ) -> dict[str, Place]:
        """Fill the stages of the schedule, cut evenly, or where there is room."""
        module, options, count = self._module, self._options, self._options.microbatches
        example, *others = (_at_home(each, module) for each in cut_rows(batch, min(count, rows_of(batch))))
        ranks = make_schedule(options, len(places), count).placement.ranks
        speeds = [places[rank].speed / ranks.count(rank) for rank in ranks]
        even = choose(
            module,
            example,
            SplitOptions(num_stages=len(ranks), speeds=speeds, through_blocks=options.through_blocks),
        )
        loads = self._loads_of(even, example)
        held = _by_place([[loads[call] for call in calls] for calls in even[2]], ranks, places)
        cut: list[str] | None = None
        if any(
            least_bytes(part, some, count, window_bytes(place)) > place.room_bytes
            for place, some in zip(places, held, strict=True)
        ):
            whole = choose(module, example, SplitOptions(num_stages=len(ranks), speeds=speeds))
            loads, pairs = self._loads_of(whole, example), inseparable_calls(whole[1])
            stages = lay_out(loads, places, ranks, num_in_flight=count, inseparable=pairs, part=part)
            cut = [whole[1].calls[calls.start].name for calls in stages]
            held = _by_place([[loads[call] for call in calls] for calls in stages], ranks, places)
        made.activations = self._offloaded(held, places, part, count)
        through = options.through_blocks and cut is None
        second = Second(
            batch=second_batch(example, others),
            microbatches=f"microbatches={count}" if count > 1 else None,
            is_read_after=True,
            has_threads=True,
        )
        found = split(module, len(ranks), example, cut=cut, speeds=speeds, through_blocks=through, second=second)
        made.pipeline = Pipeline(module, found, places, options, made.activations)
        for names, rank in zip(found.units, ranks, strict=True):
            made.units |= {unit.partition("#")[0]: places[rank].device for unit in names}
        return _owners(found, [places[rank] for rank in ranks])

    def _loads_of(self, chosen: Chosen, example: Batch) -> list[Load]:
        units, flow, _ = chosen
        return loads_of(self._module, units, flow, example, moments=self._options.moments, is_one_of_many=True)

    def _offloaded(
        self, held: Sequence[Sequence[Load]], places: Sequence[Place], part: float | None, num_in_flight: int
    ) -> PlacedActivationOffload | None:
        """Let places offload the share of their activations that does not fit, or that was requested."""
        room = sum(place.room_bytes for place in self._memory) if self._memory else None
        # A module that is to be trained later sends what was asked for. Its activations are not known by now.
        parts = dict.fromkeys(places, self._options.activations_on_host or 0.0)
        if part != 0.0:
            mine = dict(zip(places, held, strict=False))
            parts = parts_of(mine, part, num_in_flight)
            offloaded = {place: offloaded_bytes(each, mine[place], num_in_flight) for place, each in parts.items()}
            check_host(offloaded, 0, available_bytes() if room is None else room)
        if any(place.device.type != "cpu" for place in places):
            parts = {place: each for place, each in parts.items() if place.device.type != "cpu"}
        return PlacedActivationOffload(parts, room) if any(parts.values()) else None


def _by_place(stages: Sequence[Sequence[Load]], ranks: Sequence[int], places: Sequence[Place]) -> list[list[Load]]:
    """Return the units of each place, of all of its stages."""
    found: list[list[Load]] = [[] for _ in places]
    for stage, rank in zip(stages, ranks, strict=True):
        found[rank] += stage
    return found


def _owners(found: Split, places: Sequence[Place]) -> dict[str, Place]:
    """Return the place of each parameter and buffer: that of the first stage that holds it."""
    where: dict[str, Place] = {}
    for stage, place in zip(found.stages, places, strict=True):
        assert stage is not None, "all stages are in this process"
        for name in (*stage.parameters, *stage.buffers):
            where.setdefault(name, place)
    return where


def _at_home(example: Batch, module: nn.Module) -> Batch:
    """Return a batch on the device of the module's weights before they are placed."""
    home = next((each.device for each in module.parameters()), home_of(example))
    return {name: moved(each, home) for name, each in example.items()}
