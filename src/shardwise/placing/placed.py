"""The module that `place` gives back: the user's own, over several places."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.execution.pipeline import schedule_of
from shardwise.placing.activation_offload import Stashes
from shardwise.placing.activation_share import Hosting, hosted_bytes
from shardwise.placing.batch_rows import cut_rows, home_of, rows_of
from shardwise.placing.device_moves import moved
from shardwise.placing.host import HostWeights, divide
from shardwise.placing.layout import NoRoomError, by_rank, fits, lay_out
from shardwise.placing.loads import Load, find_loads, loads_of, trains
from shardwise.placing.moving import Mover, settle
from shardwise.placing.offload_planner import Question, Way, check_host, decide, parts_of
from shardwise.placing.pipeline import Pipeline
from shardwise.placing.places import Place
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.stages.split import split
from shardwise.stages.split.choose import Chosen, Wishes, choose
from shardwise.stages.split.outline import leaves_of
from shardwise.stages.split.parts import inseparable_calls
from shardwise.stages.stage import Batch, Split
from shardwise.torch_private import share_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
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


class Placed(nn.Module):
    """A module over several places, used like the one that it was made from.

    It has the same children, parameters and buffers under the same names. What it has not itself, like `generate` or
    `config`, is asked of that module.
    """

    def __init__(self, module: nn.Module, places: Sequence[Place], wish: Wish) -> None:
        super().__init__()
        # Not a child: names of parameters stay as they are.
        self.__dict__["_placed"] = module
        share_slots(self, module)
        self.training = module.training
        self.places, self._wish = tuple(places), wish
        self._signature = inspect.signature(module.forward)
        #: Where parameters and buffers are, by name, once that is decided.
        self.where: dict[str, Place] = {}
        #: Why the host is used as it is, where it had to be.
        self.reason = ""
        #: The part of the activations that is on the host, if any is.
        self.stashes: Stashes | None = None
        self._mover: Mover | None = None
        self._host: HostWeights | None = None
        self._pipeline: Pipeline | None = None
        self._is_by_layers = False  # Whatever the number of microbatches.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. With several microbatches it is computed on all places at once."""
        module: nn.Module = self.__dict__["_placed"]
        if self._wish.microbatches == 1 or self._is_by_layers or _has_cache(kwargs):
            if not self.where:
                self.lay_out(None)
            return self._run_by_layers(module, args, kwargs)
        batch = self._batch(args, kwargs)
        if self._pipeline is None:
            self.lay_out(batch)
        return self._run_by_layers(module, args, kwargs) if self._pipeline is None else self._pipeline.run(batch)

    def lay_out(self, example: Batch | None) -> None:
        """Decide where everything goes, from a batch if there is one, and bring it there."""
        devices, memory = divide(self.places, self._wish.host)
        part = self._wish.activations_on_host
        try:
            # One device beside the host goes layer by layer: there is nobody else to be kept busy.
            self._lay_out_on(
                devices, example, Hosting(part=part) if part else None, is_alone=_is_alone(devices, memory)
            )
        except NoRoomError:
            if not memory:
                raise
            self._lay_out_beside(devices, memory, example)

    def train(self, mode: bool = True) -> "Placed":
        self.__dict__["_placed"].train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_placed"].state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._host is not None and (kwargs.get("assign") or args[1:] == (True,)):
            self._host.refuse("load_state_dict(..., assign=True)", "load_state_dict(...), which copies")
        return self.__dict__["_placed"].load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Placed":
        """Types may be changed (`half()`); where things are is decided here, so they go back there."""
        if self._host is not None:
            self._host.refuse("to(...)", "to(...) before sw.place(...)")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.where and self._host is None:
            settle(self.__dict__["_placed"], {name: place.device for name, place in self.where.items()})
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_placed" not in self.__dict__:
                raise
            return getattr(self.__dict__["_placed"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placed":
        raise ShardwiseError(
            "a placed module cannot be copied: its stages belong to the one that it was made from",
            remedy="copy.deepcopy(module) before sw.place(...), or state_dict()",
        )

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        given: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD and len(self._signature.parameters) == 1:
                given.update(value)
            elif kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                raise ShardwiseError(
                    f"{type(self.__dict__['_placed']).__name__}.forward has no name for"
                    f" {', '.join(value) if isinstance(value, dict) else f'the last {len(value)} arguments'}, so they"
                    " cannot be cut into microbatches",
                    remedy="name them in forward's signature, or microbatches=1",
                )
            else:
                given[name] = value
        return given

    def _run_by_layers(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.stashes is None or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        given = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        guests = [] if self._host is None else self._host.guests
        with self.stashes.saving([*module.parameters(), *module.buffers(), *guests, *given]):
            return module(*args, **kwargs)

    def _lay_out_on(
        self, places: Sequence[Place], example: Batch | None, hosting: Hosting | None, *, is_alone: bool
    ) -> None:
        """Put everything on some of the places, each of which computes what it has."""
        module: nn.Module = self.__dict__["_placed"]
        if example is not None and self._wish.microbatches > 1 and not is_alone:
            where = self._lay_out_stages(module, places, example, hosting)
        else:
            where = self._lay_out_units(module, places, example, hosting)
        self._is_by_layers = is_alone
        self.where = {name: where.get(name, places[0]) for name in _names(module)}
        settle(module, {name: place.device for name, place in self.where.items()})

    def _lay_out_beside(self, devices: Sequence[Place], memory: Sequence[Place], example: Batch | None) -> None:
        """Not everything fits on the devices: the rest is streamed to them, or computed by the host."""
        module, wish = self.__dict__["_placed"], self._wish
        example = None if example is None else _at_home(example, module)
        loads = find_loads(module, example, moments=wish.moments)
        choice = decide(
            Question(
                module=module,
                loads=loads,
                devices=devices,
                memory=memory,
                moments=wish.moments,
                is_pipelined=wish.microbatches > 1 and not _is_alone(devices, memory),
                host=wish.host,
                part=wish.activations_on_host,
                has_folder=wish.folder is not None,
            )
        )
        self.reason = choice.reason
        for number, way in enumerate(choice.ways):
            try:
                self._go(way, devices, memory, example)
                return
            except NoRoomError:  # Stages are of whole units, so there may be less room than it seemed.
                if number == len(choice.ways) - 1:
                    raise

    def _go(self, way: Way, devices: Sequence[Place], memory: Sequence[Place], example: Batch | None) -> None:
        """Make room in one of the ways."""
        module = self.__dict__["_placed"]
        if way.host_computes:
            self._lay_out_on(self.places, example, None, is_alone=False)
        elif not way.units:
            self._lay_out_on(devices, example, way.hosting, is_alone=_is_alone(devices, memory))
        else:
            room = sum(place.room_bytes for place in memory)
            self._host = HostWeights(module, way.units, room - way.hosted_bytes, memory[0], self._wish.folder)
            self._is_by_layers = True
            self.where = self._host.where
            self._install_mover(module, self._host.devices)
            # A module that is to be trained later sends what was asked for.
            parts = way.parts or dict.fromkeys(devices, self._wish.activations_on_host or 0.0)
            self.stashes = Stashes(parts, max(0, room - self._host.host_bytes)) if any(parts.values()) else None

    def _lay_out_units(
        self, module: nn.Module, places: Sequence[Place], example: Batch | None, hosting: Hosting | None
    ) -> dict[str, Place]:
        """Layer by layer: runs of units, and those that share a weight on one place."""
        found = find_loads(module, None if example is None else _at_home(example, module), moments=self._wish.moments)
        loads = found.calls
        ranks = range(min(len(places), len(loads)))
        hosting = hosting if trains(module) else None
        stages = lay_out(loads, places, ranks, num_in_flight=1, inseparable=found.inseparable, hosting=hosting)
        self._send_activations([[loads[call] for call in calls] for calls in stages], places, hosting, 1)
        where: dict[str, Place] = {}
        on: dict[str, torch.device] = {}
        for place, calls in zip(places, stages, strict=False):
            for load in (loads[call] for call in calls):
                shared = next((where[name] for name in load.states if name in where), place)
                on.setdefault(load.unit, shared.device)
                where.update({name: where.get(name, shared) for name in load.states})
        self._install_mover(module, on)
        return where

    def _lay_out_stages(
        self, module: nn.Module, places: Sequence[Place], batch: Batch, hosting: Hosting | None
    ) -> dict[str, Place]:
        """In a pipeline: the stages of the schedule, cut where they are even, or where there is room."""
        wish = self._wish
        microbatches = cut_rows(batch, min(wish.microbatches, rows_of(batch)))
        example = _at_home(microbatches[0], module)
        schedule = wish.make_schedule(len(places), wish.microbatches)
        ranks = schedule.placement.ranks
        if len(schedule.placement.pipes) > 1 or schedule.staleness:
            raise ShardwiseError(
                f"{wish.schedule} holds the weights twice, and a placed module has one of each",
                remedy='schedule="zb-v"',
            )
        speeds = [places[rank].speed / ranks.count(rank) for rank in ranks]
        wishes = _wishes(speeds, through_blocks=wish.through_blocks)
        chosen = choose(module, example, wishes)
        loads = _loads(module, chosen, example, wish)
        cut: list[str] | None = None
        hosting = hosting if trains(module) else None
        held = [[loads[call] for call in calls] for calls in chosen[2]]
        if not fits(held, places, ranks, num_in_flight=wish.microbatches, hosting=hosting):
            chosen = choose(module, example, _wishes(speeds))
            loads, pairs = _loads(module, chosen, example, wish), inseparable_calls(chosen[1])
            stages = lay_out(loads, places, ranks, num_in_flight=wish.microbatches, inseparable=pairs, hosting=hosting)
            cut = [chosen[1].calls[calls.start].name for calls in stages]
            held = [[loads[call] for call in calls] for calls in stages]
        self._send_activations(by_rank(held, ranks, len(places)), places, hosting, wish.microbatches)
        through = wish.through_blocks and cut is None
        found = split(module, len(ranks), example, cut=cut, speeds=speeds, through_blocks=through)
        self._pipeline = Pipeline(
            module,
            found,
            places,
            num_microbatches=wish.microbatches,
            make_schedule=lambda count: wish.make_schedule(len(places), count),
            stashes=self.stashes,
        )
        owners = _owners(found, [places[rank] for rank in ranks])
        units = {
            unit.partition("#")[0]: places[rank].device
            for names, rank in zip(found.units, ranks, strict=True)
            for unit in names
        }
        self._install_mover(module, units)
        return owners

    def _send_activations(
        self, held: Sequence[Sequence[Load]], places: Sequence[Place], hosting: Hosting | None, num_in_flight: int
    ) -> None:
        """Have places send the part of their activations that there is no room for, or that was asked for."""
        _, memory = divide(self.places, self._wish.host)
        room = sum(place.room_bytes for place in memory) if memory else None
        # A module that is to be trained later sends what was asked for. Its activations are not known by now.
        parts = dict.fromkeys(places, self._wish.activations_on_host or 0.0)
        if hosting is not None:
            mine = dict(zip(places, held, strict=False))
            parts = parts_of(mine, hosting, num_in_flight)
            away = {place: hosted_bytes(part, mine[place], num_in_flight) for place, part in parts.items()}
            check_host(away, 0, available_bytes() if room is None else room)
        if any(place.device.type != "cpu" for place in places):
            parts = {place: part for place, part in parts.items() if place.device.type != "cpu"}
        self.stashes = Stashes(parts, room) if any(parts.values()) else None

    def _install_mover(self, module: nn.Module, units: dict[str, torch.device]) -> None:
        if self._mover is not None:
            self._mover.remove()
        self._mover = Mover(module, units) if len({place.device for place in self.places}) > 1 else None


def _is_alone(devices: Sequence[Place], memory: Sequence[Place]) -> bool:
    return bool(memory) and len(devices) == 1


def _loads(module: nn.Module, chosen: Chosen, example: Batch, wish: Wish) -> list[Load]:
    units, flow, _ = chosen
    return loads_of(module, units, flow, example, moments=wish.moments)


def _wishes(speeds: Sequence[float], *, through_blocks: bool = False) -> Wishes:
    return Wishes(
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


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fills or reads a cache of keys and values: those go layer by layer."""
    return bool(kwargs.get("use_cache")) or kwargs.get("past_key_values") is not None


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
