"""Optimizer state that lives on the host and visits the device when its weights are updated.

    compute   forward, backward | 0 | 1 | 2 | 3 | ...       a round each, by the optimizer itself
    in        s0 s1 s2 s3         s4  s5  s6                  ahead of its turn, as far as there are slots
    out                           s0  s1  s2  s3              while others come

Between two steps an optimizer looks as ever: `optimizer.state` has an entry for each weight, of some of them with
tensors on the host. So what saves it, loads it or changes its settings need not know. It steps on the weights whose
state is in a slot: on several small ones at once, on a large one in parts where every number is treated by itself.
Weights and gradients do not move, and the arithmetic is the device's: the numbers are those of the plain optimizer to
the last bit.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cost.memory import NUM_SLOTS, SLOT_BYTES
from shardwise.dataflow.streams import Mark
from shardwise.runtime.offload.crossing import Crossing
from shardwise.runtime.optimizers.share import ELEMENTWISE

#: Where a tensor may begin in a slot.
_ALIGNMENT = 256


class _Visit(NamedTuple):
    """Some rows of a weight, or (None) all of it."""

    weight: nn.Parameter
    rows: slice | None

    def of(self, tensor: Tensor) -> Tensor:
        """What belongs to it of the weight, or of something that has a number for each of the weight's."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(eq=False)
class _Round:
    """What is updated together. `back` is reached when its state is on the host again."""

    optimizer: Optimizer
    visits: list[_Visit] = field(default_factory=list)
    back: list[Mark] = field(default_factory=list)


class _Here(NamedTuple):
    """A round whose state is in a slot, or on its way: by visit, under the optimizer's names."""

    round: _Round
    slot: int
    states: list[dict[str, Tensor]]
    arrives: list[Mark]


class HostStates:
    """The state of a part of the weights of some optimizers, on the host.

    `optimizers` are given with the bytes that each keeps for a number. `fraction` is the least part of all of these
    that is on the host; what stays is of the first weights in order, as far as they fit.
    """

    def __init__(self, optimizers: Mapping[Optimizer, float], fraction: float, crossing: Crossing) -> None:
        self._optimizers, self._crossing = list(optimizers), crossing
        sizes = {weight: weight.numel() * each for one, each in optimizers.items() for weight in weights_of(one)}
        #: Those whose state is on the host.
        self.weights = choose(sizes, fraction)
        #: What will be there once all of them have been updated.
        self.planned_bytes = round(sum(sizes[each] for each in self.weights))
        self._rounds = [one for each, number_bytes in optimizers.items() for one in self._plan(each, number_bytes)]
        self._slots: list[Tensor | None] = [None] * NUM_SLOTS
        #: Slots that nobody has, and when the last one to have it is gone.
        self._free: deque[tuple[int, list[Mark]]] = deque((number, []) for number in range(NUM_SLOTS))
        #: The rounds of a step whose state has still to come, if one has begun, and those whose state is coming.
        self._queue: deque[_Round] | None = None
        self._here: deque[_Here] = deque()
        self._homes: dict[nn.Parameter, dict[str, Tensor]] = {}
        #: Weights that have no state yet.
        self._fresh: set[nn.Parameter] = set()

    @property
    def num_bytes(self) -> int:
        """What is on the host now."""
        return sum(each.nbytes for homes in self._homes.values() for each in homes.values())

    def begin(self) -> None:
        """A step begins: the first states come, under its forwards and backwards."""
        if any(value is not self._homes.get(weight, {}).get(key) for _, weight, key, value in self._entries()):
            self.take_home()
        if self._queue is None:
            self._queue = deque(self._rounds)
            self._fresh = {
                weight for each in self._optimizers for weight in weights_of(each) if not each.state.get(weight)
            }
        self._fetch_ahead()

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights that have a gradient."""
        self.begin()
        for optimizer in self._optimizers:
            stay = [[each for each in group["params"] if each not in self.weights] for group in optimizer.param_groups]
            if any(each.grad is not None for params in stay for each in params):
                with _only(optimizer, stay):
                    optimizer.step()
        told: dict[nn.Parameter, dict[str, Any]] = {}
        while self._here:
            self._update(self._here.popleft(), told)
            self._fetch_ahead()
        # Parts of one weight must all begin with the same count of steps, so it is told at the end.
        for optimizer in self._optimizers:
            optimizer.state.update({weight: told[weight] for weight in weights_of(optimizer) if weight in told})
        self._queue = None

    def wait(self) -> None:
        """Wait until all state is on the host."""
        for mark in [mark for each in self._rounds for mark in each.back]:
            mark.wait()

    @torch.no_grad()
    def take_home(self) -> None:
        """State was perhaps put into the optimizers from outside: it goes to the host, and what is coming is old."""
        self.wait()
        while self._here:
            _, slot, _, arrives = self._here.popleft()
            self._free.append((slot, arrives))
        self._queue = None
        homes: dict[nn.Parameter, dict[str, Tensor]] = {}
        for optimizer, weight, key, value in list(self._entries()):
            home = value
            if value is not self._homes.get(weight, {}).get(key):
                home = self._crossing.pinned(value.shape, value.dtype)
                home.copy_(value)
                optimizer.state[weight][key] = home
            homes.setdefault(weight, {})[key] = home
        self._homes = homes

    def close(self) -> None:
        """Let go of the slots. The state stays where it is."""
        self.wait()
        for each in self._here:
            for mark in each.arrives:
                mark.wait()
        self._here.clear()
        self._slots = [None] * NUM_SLOTS

    def _entries(self) -> Iterator[tuple[Optimizer, nn.Parameter, str, Tensor]]:
        """What optimizers keep of weights whose state is on the host, but for single numbers: these are anywhere."""
        for optimizer in self._optimizers:
            for weight in weights_of(optimizer):
                for key, value in optimizer.state.get(weight, {}).items() if weight in self.weights else ():
                    if isinstance(value, Tensor) and value.dim():
                        yield optimizer, weight, key, value

    def _plan(self, optimizer: Optimizer, number_bytes: float) -> Iterator[_Round]:
        """The rounds of an optimizer, each of about a slot."""
        most = max(int(SLOT_BYTES // max(number_bytes, 1.0)), 1)
        found, left = _Round(optimizer), most
        for weight in weights_of(optimizer):
            for visit in _cut(weight, most, can_cut=type(optimizer) in ELEMENTWISE) if weight in self.weights else ():
                size = visit.of(weight).numel()
                if found.visits and size > left:
                    yield found
                    found, left = _Round(optimizer), most
                found.visits.append(visit)
                left -= size
        if found.visits:
            yield found

    def _fetch_ahead(self) -> None:
        """Have those come that are next, as long as there are slots."""
        while self._queue and self._free:
            one = self._queue.popleft()
            slot, gone = self._free.popleft()
            homes = [{key: each.of(home) for key, home in self._homes_of(each.weight).items()} for each in one.visits]
            states = self._room(slot, gone, homes)
            # Memory of a slot that was just taken has been somebody else's until now.
            after = [*gone, *one.back, *self._crossing.computed()]
            arrives = [
                self._crossing.inward(here[key], home[key], after)
                for here, home in zip(states, homes, strict=True)
                for key in home
            ]
            self._here.append(_Here(one, slot, states, arrives[-1:]))

    def _homes_of(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Where a weight's state lives. In the step that makes it, there is nothing to be brought yet."""
        return {} if weight in self._fresh else self._homes.get(weight, {})

    def _room(self, slot: int, gone: list[Mark], homes: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Places in a slot for tensors like these."""
        size = sum(_aligned(each.nbytes) for home in homes for each in home.values())
        memory = self._slots[slot]
        if memory is None or memory.numel() < size:
            for mark in gone:
                mark.wait()
            memory = self._slots[slot] = torch.empty(size, dtype=torch.uint8, device=self._crossing.device)
        found, at = [], 0
        for home in homes:
            places = {}
            for key, each in home.items():
                places[key] = memory[at : at + each.nbytes].view(each.dtype).view(each.shape)
                at += _aligned(each.nbytes)
            found.append(places)
        return found

    def _update(self, here: _Here, told: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Step on a round's weights, as far as they have gradients, and send their state back."""
        optimizer, arrives = here.round.optimizer, here.arrives
        for mark in arrives:
            self._crossing.follow(mark)
        visitors: dict[nn.Parameter, list[tuple[_Visit, nn.Parameter]]] = {}
        for visit, state in zip(here.round.visits, here.states, strict=True):
            weight = visit.weight
            if weight.grad is None:
                continue
            visitor = nn.Parameter(visit.of(weight.detach()))
            visitor.grad = visit.of(weight.grad)
            visitors.setdefault(weight, []).append((visit, visitor))
            if weight not in self._fresh:
                kept = optimizer.state[weight].items()
                optimizer.state[visitor] = {key: state[key] if key in state else _own(each) for key, each in kept}
        groups = [[weight for weight in group["params"] if weight in visitors] for group in optimizer.param_groups]
        if visitors:
            with _only(optimizer, [[one for each in mine for _, one in visitors[each]] for mine in groups]):
                optimizer.step()
            together = [each for mine in visitors.values() for each in mine]
            here.round.back = arrives = self._send(optimizer, together, here.states, told)
        self._free.append((here.slot, arrives))

    def _send(
        self,
        optimizer: Optimizer,
        visitors: Iterable[tuple[_Visit, nn.Parameter]],
        states: Iterable[Mapping[str, Tensor]],
        told: dict[nn.Parameter, dict[str, Any]],
    ) -> list[Mark]:
        """Send home what the optimizer has written, and tell what it keeps of each weight now."""
        in_slot = {id(each) for state in states for each in state.values()}
        back: list[Mark] = []
        strays: list[Tensor] = []
        for visit, visitor in visitors:
            state = optimizer.state.pop(visitor, {})
            entries = told.setdefault(visit.weight, {}) if state else {}
            for key, value in state.items():
                if not (isinstance(value, Tensor) and value.dim()):
                    entries[key] = value
                    continue
                entries[key] = self._home(visit, key, value)
                if id(value) not in in_slot:
                    strays.append(value := value.contiguous())
                back.append(self._crossing.outward(visit.of(entries[key]), value))
        if strays:
            # Memory that the optimizer has taken by itself, as in its first step, is anybody's after this.
            for mark in back:
                mark.wait()
        return back[-1:]

    def _home(self, visit: _Visit, key: str, value: Tensor) -> Tensor:
        """Where an entry of a weight's state lives."""
        homes = self._homes.setdefault(visit.weight, {})
        if key not in homes:
            shape = value.shape if visit.rows is None else visit.weight.shape
            homes[key] = self._crossing.pinned(shape, value.dtype)
        return homes[key]


def weights_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """What an optimizer has, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def choose(sizes: Mapping[nn.Parameter, float], fraction: float) -> set[nn.Parameter]:
    """The weights whose state, of these sizes, is on the host: at least this part of all of it."""
    left = (1 - fraction) * sum(sizes.values())
    found = set()
    for weight, size in sizes.items():
        if fraction < 1 and size <= left:
            left -= size
        else:
            found.add(weight)
    return found


def _cut(weight: nn.Parameter, most: int, *, can_cut: bool) -> Iterator[_Visit]:
    """A weight in parts of whole rows, each of about so many numbers."""
    if not can_cut or weight.numel() <= most:
        yield _Visit(weight, None)
        return
    step = max(most * weight.shape[0] // weight.numel(), 1)
    for start in range(0, weight.shape[0], step):
        yield _Visit(weight, slice(start, min(start + step, weight.shape[0])))


def _own(value: Any) -> Any:
    """A count of steps, say, for a part of a weight: it is counted up there."""
    return value.clone() if isinstance(value, Tensor) else value


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def _only(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """An optimizer that has these alone, by group."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, mine in zip(optimizer.param_groups, params, strict=True):
            group["params"] = mine
        yield
    finally:
        for group, mine in zip(optimizer.param_groups, before, strict=True):
            group["params"] = mine
