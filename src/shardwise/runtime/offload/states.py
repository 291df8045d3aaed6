"""Optimizer state that lives on the host and visits the device when its weights are updated.

    compute   forward | backward, gradients of 3, 2, 1, 0 | forward of 0, 1, 2, 3
    in        s3 s2        s1  s0                              ahead of its turn, as far as there are slots
    update                 3   2   1   0                       a round each, by the optimizer itself
    out                        s3  s2  s1  s0                  while others come

A round is updated when somebody says that the gradients of its weights are final, or at the step's end. On a GPU that
runs beside the computation: nothing waits on the host, and `follow` puts what uses a weight behind its update.

Between two steps an optimizer looks as ever: `optimizer.state` has an entry for each weight, of some of them with
tensors on the host. So what saves it, loads it or changes its settings need not know. It steps on the weights whose
state is in a slot: on several small ones at once, on a large one in parts where every number is treated by itself. The
arithmetic is the device's: the numbers are those of the plain optimizer to the last bit.

A weight may itself live on the host (`Lodging`): then it comes with its state, and its gradient when that is final.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cost.memory import NUM_SLOTS, SLOT_BYTES
from shardwise.dataflow.streams import Mark
from shardwise.runtime.offload.crossing import Crossing
from shardwise.runtime.offload.slots import Slots
from shardwise.runtime.optimizers.share import ELEMENTWISE

#: What comes beside an optimizer's own entries where a weight lives on the host. No optimizer calls an entry so.
_WEIGHT, _GRADIENT = "(weight)", "(gradient)"


class Lodging(Protocol):
    """A weight that lives on the host."""

    #: Its numbers, and those of its gradient, in the weight's shape.
    home: Tensor
    gradient: Tensor
    #: Whether this step has a gradient, and marks after which it is there.
    has_gradient: bool
    sent: list[Mark]

    def is_renewed(self, marks: Sequence[Mark]) -> None:
        """The numbers at home are new once these marks are reached."""
        ...


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
    #: Weights of which nobody has said yet that their gradients are final.
    missing: set[nn.Parameter] = field(default_factory=set)

    @property
    def weights(self) -> set[nn.Parameter]:
        return {each.weight for each in self.visits}


class _Here(NamedTuple):
    """A round whose state is in a slot, or on its way: by visit, under the optimizer's names."""

    round: _Round
    slot: int
    states: list[dict[str, Tensor]]
    arrives: list[Mark]


class _Leaving(NamedTuple):
    """What an optimizer has written: where it lives, and where it is."""

    home: Tensor
    here: Tensor


class HostStates:
    """The state of a part of the weights of some optimizers, on the host.

    `optimizers` are given with the bytes that each keeps for a number. `fraction` is the least part of all of these
    that is on the host; what stays is of the first weights in order, as far as they fit. The state of weights that
    live there themselves, `lodgings`, is there in any case.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, float],
        fraction: float,
        crossing: Crossing,
        lodgings: Mapping[nn.Parameter, Lodging] | None = None,
    ) -> None:
        self._optimizers, self._crossing, self._lodgings = list(optimizers), crossing, lodgings or {}
        sizes = {weight: weight.numel() * each for one, each in optimizers.items() for weight in weights_of(one)}
        #: Those whose state is on the host.
        self.weights = choose(sizes, fraction, self._lodgings)
        #: What will be there once all of them have been updated.
        self.planned_bytes = round(sum(sizes[each] for each in self.weights))
        #: In the order in which their gradients are expected: at first, that of the weights.
        self._rounds = [one for each, number_bytes in optimizers.items() for one in self._plan(each, number_bytes)]
        self._rounds_of: dict[nn.Parameter, list[_Round]] = {}
        for each in self._rounds:
            for weight in each.weights:
                self._rounds_of.setdefault(weight, []).append(each)
        self._slots = Slots(NUM_SLOTS, crossing)
        #: The rounds of a step whose state has still to come, if one has begun, and those whose state is coming.
        self._queue: list[_Round] | None = None
        self._here: deque[_Here] = deque()
        #: The rounds of this step that may be updated, in that order.
        self._asked: dict[_Round, None] = {}
        self._homes: dict[nn.Parameter, dict[str, Tensor]] = {}
        #: Weights that had no state when the step began, and what the optimizers keep of those updated since then.
        self._fresh: set[nn.Parameter] = set()
        self._told: dict[nn.Parameter, dict[str, Any]] = {}
        #: When weights that were updated are new.
        self._renewed: dict[nn.Parameter, list[Mark]] = {}

    @property
    def num_bytes(self) -> int:
        """What is on the host now."""
        return sum(each.nbytes for homes in self._homes.values() for each in homes.values())

    def begin(self) -> None:
        """A step begins: the first states come, under its forwards and backwards."""
        if any(value is not self._homes.get(weight, {}).get(key) for _, weight, key, value in self._entries()):
            self.take_home()
        if self._queue is None:
            self._queue = list(self._rounds)
            self._asked.clear()
            for each in self._rounds:
                each.missing = each.weights
            self._fresh = {
                weight for each in self._optimizers for weight in weights_of(each) if not each.state.get(weight)
            }
        self._fetch_ahead()

    @torch.no_grad()
    def ready(self, weights: Iterable[nn.Parameter]) -> None:
        """The gradients of these weights are final: update them as soon as their state is here."""
        for weight in weights:
            for each in self._rounds_of.get(weight, ()):
                each.missing.discard(weight)
                if not each.missing:
                    self._asked[each] = None
        self._advance()

    @torch.no_grad()
    def step(self) -> None:
        """End a step: all weights are updated that have a gradient, or will be beside what is computed next."""
        self.begin()
        for optimizer in self._optimizers:
            stay = [[each for each in group["params"] if each not in self.weights] for group in optimizer.param_groups]
            if any(each.grad is not None for params in stay for each in params):
                with _only(optimizer, stay):
                    optimizer.step()
        self._asked |= dict.fromkeys(self._rounds)
        self._advance()
        assert not self._here, "all that came was updated"
        # Parts of one weight must all begin with the same count of steps, so it is told at the end.
        for optimizer in self._optimizers:
            mine = [weight for weight in weights_of(optimizer) if weight in self._told]
            optimizer.state.update({weight: self._told[weight] for weight in mine})
        self._told.clear()
        # The next backward will give gradients in the same order.
        self._rounds = list(self._asked)
        self._queue = None

    def follow(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """What is computed from now on comes after the updates of some weights, or of all."""
        for weight in list(self._renewed) if weights is None else weights:
            for mark in self._renewed.pop(weight, ()):
                self._crossing.follow(mark)

    def wait(self) -> None:
        """Wait until all state is on the host, and what is computed from now on uses the new weights."""
        self.follow()
        for mark in [mark for each in self._rounds for mark in each.back]:
            mark.wait()

    @torch.no_grad()
    def take_home(self) -> None:
        """State was perhaps put into the optimizers from outside: it goes to the host, and what is coming is old."""
        self.wait()
        while self._here:
            _, slot, _, arrives = self._here.popleft()
            self._slots.give_back(slot, arrives)
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
        self._slots.clear()

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
        """Have those come that may be updated, or else are next, as long as there are slots."""
        while self._queue and self._slots.are_free:
            one = next((each for each in self._queue if each in self._asked), self._queue[0])
            self._queue.remove(one)
            homes = [self._homes_of(each) for each in one.visits]
            slot, states, after = self._slots.take(homes)
            arrives = [
                self._crossing.inward(here[key], home[key], [*after, *one.back])
                for here, home in zip(states, homes, strict=True)
                for key in home
                if key != _GRADIENT  # It comes when it is final.
            ]
            self._here.append(_Here(one, slot, states, arrives[-1:]))

    def _homes_of(self, visit: _Visit) -> dict[str, Tensor]:
        """Where lives what comes to a visit. In the step that makes a weight's state, there is none yet."""
        found = {} if visit.weight in self._fresh else {**self._homes.get(visit.weight, {})}
        lodging = self._lodgings.get(visit.weight)
        if lodging is not None:
            found |= {_WEIGHT: lodging.home, _GRADIENT: lodging.gradient}
        return {key: visit.of(home) for key, home in found.items()}

    def _advance(self) -> None:
        """Update what is here and may be, and have others come instead."""
        while (here := next((each for each in self._here if each.round in self._asked), None)) is not None:
            self._here.remove(here)
            self._update(here)
            self._fetch_ahead()

    def _update(self, here: _Here) -> None:
        """Have a round's weights stepped on, as far as they have gradients, and their state sent back."""
        visits = [
            (visit, state)
            for visit, state in zip(here.round.visits, here.states, strict=True)
            if self._has_gradient(visit.weight)
        ]
        if not visits:
            self._slots.give_back(here.slot, here.arrives)
            return
        arrives = [*here.arrives, *self._bring_gradients(visits)]
        leaving: list[_Leaving] = []
        renewed = self._crossing.beside(partial(self._run, here.round.optimizer, visits, leaving), arrives)
        back = [self._crossing.outward(home, written, renewed) for home, written in leaving]
        in_slot = {id(each) for state in here.states for each in state.values()}
        if any(id(each.here) not in in_slot for each in leaving):
            # Memory that the optimizer has taken by itself, as in its first step, is anybody's after this.
            for mark in back:
                mark.wait()
        for weight in {visit.weight for visit, _ in visits}:
            if weight in self._lodgings:
                self._lodgings[weight].is_renewed(back[-1:])
            else:
                self._renewed.setdefault(weight, []).extend(renewed)
        here.round.back = back[-1:] or renewed
        self._slots.give_back(here.slot, here.round.back)

    def _has_gradient(self, weight: nn.Parameter) -> bool:
        lodging = self._lodgings.get(weight)
        return weight.grad is not None if lodging is None else lodging.has_gradient

    def _bring_gradients(self, visits: Sequence[tuple[_Visit, Mapping[str, Tensor]]]) -> list[Mark]:
        """Have the gradients come that are on the host."""
        marks = []
        for visit, state in visits:
            lodging = self._lodgings.get(visit.weight)
            if lodging is not None:
                marks.append(self._crossing.inward(state[_GRADIENT], visit.of(lodging.gradient), lodging.sent))
        return marks[-1:]

    @torch.no_grad()
    def _run(
        self, optimizer: Optimizer, visits: Sequence[tuple[_Visit, Mapping[str, Tensor]]], leaving: list[_Leaving]
    ) -> None:
        """Step on what is here, and say what goes home."""
        visitors: dict[nn.Parameter, list[nn.Parameter]] = {}
        pairs: list[tuple[_Visit, Mapping[str, Tensor], nn.Parameter]] = []
        for visit, state in visits:
            weight = visit.weight
            visitor = self._visitor(visit, state)
            visitors.setdefault(weight, []).append(visitor)
            pairs.append((visit, state, visitor))
            if weight not in self._fresh:
                kept = optimizer.state[weight].items()
                optimizer.state[visitor] = {key: state[key] if key in state else _own(each) for key, each in kept}
        groups = [[weight for weight in group["params"] if weight in visitors] for group in optimizer.param_groups]
        with _only(optimizer, [[one for each in mine for one in visitors[each]] for mine in groups]):
            optimizer.step()
        for visit, state, visitor in pairs:
            leaving += self._leaving(visit, state, optimizer.state.pop(visitor, {}))

    def _visitor(self, visit: _Visit, state: Mapping[str, Tensor]) -> nn.Parameter:
        """What the optimizer sees of a weight, with its gradient."""
        if _WEIGHT in state:
            visitor = nn.Parameter(state[_WEIGHT])
            visitor.grad = state[_GRADIENT]
            return visitor
        visitor, gradient = nn.Parameter(visit.of(visit.weight.detach())), visit.weight.grad
        assert gradient is not None, "without a gradient nothing is updated"
        visitor.grad = visit.of(gradient)
        if gradient.is_cuda:  # Its memory is the backward's, which does not know of this stream.
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        return visitor

    def _leaving(self, visit: _Visit, here: Mapping[str, Tensor], state: Mapping[str, Any]) -> Iterator[_Leaving]:
        """What goes home of a visit, and tell what the optimizer keeps of the weight now."""
        if _WEIGHT in here:
            yield _Leaving(visit.of(self._lodgings[visit.weight].home), here[_WEIGHT])
        entries = self._told.setdefault(visit.weight, {}) if state else {}
        for key, value in state.items():
            if not (isinstance(value, Tensor) and value.dim()):
                entries[key] = value
                continue
            entries[key] = self._home(visit, key, value)
            yield _Leaving(visit.of(entries[key]), value.contiguous())

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


def choose(
    sizes: Mapping[nn.Parameter, float], fraction: float, always: Iterable[nn.Parameter] = ()
) -> set[nn.Parameter]:
    """The weights whose state, of these sizes, is on the host: at least this part of all of it, and some always."""
    left = (1 - fraction) * sum(sizes.values())
    found = {each for each in always if each in sizes}
    for weight, size in sizes.items():
        if weight in found:
            continue
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
