"""Optimizer state that lives on the host and visits the device when its weights are updated.

A round is updated when somebody says that the gradients of its weights are final, or at the step's end;
`state_prefetch.py` has its state there by then. On a GPU that runs beside the computation, and `follow` puts what uses
a weight behind its update.

Between two steps an optimizer looks as ever: `optimizer.state` has an entry for each weight, of some of them with
tensors on the host. So what saves it, loads it or changes its settings need not know. It steps on the weights whose
state is in a slot: on several small ones at once, on a large one in parts where every number is treated by itself. The
arithmetic is the device's: the numbers are those of the plain optimizer to the last bit.

A weight may itself live on the host, and its gradient: `residency.py`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cost.memory import NUM_SLOTS, SLOT_BYTES
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.chunks import Round, choose, plan_rounds
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.paced_prefetch import PacedVisits
from shardwise.states.tiers.partial_step import Substitute, is_many, only, set_rate, step_on, weights_of
from shardwise.states.tiers.residency import Lodger, Lodging, Places, Resident, Visit
from shardwise.states.tiers.staging import Slots, lay_out, size_of, spare_bytes
from shardwise.states.tiers.state_prefetch import Homes, Visits, Written

#: One round on its way in, one updated, one on its way out.
_LEAST_SLOTS = 3

#: Slots are larger by this where threads tell of copies: between two the link waits for them, however long these are
#: (Llama-3B on an H200: 17,100 tokens/s, and 16,300 with rounds half as large).
_LARGER_IF_PACED = 2


class HostStates:
    """The state of a part of the weights of some optimizers, on the host.

    `optimizers` are given with the bytes that each keeps for a number. `fraction` is the least part of all of these
    that is on the host; what stays is of the first weights in order, as far as they fit. The state of weights that
    live there themselves, `lodgings`, is there in any case. `residents` say otherwise of some weights how they come.

    `visiting_bytes` of the device are for visitors. By default these have what plans count, and from the second step
    on part of what nobody has needed. `paced`: optimizers may be stepped by other threads than the caller's.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, float],
        fraction: float,
        crossing: Crossing,
        lodgings: Mapping[nn.Parameter, Lodging] | None = None,
        *,
        residents: Mapping[nn.Parameter, Resident] | None = None,
        visiting_bytes: int | None = None,
        paced: bool = False,
    ) -> None:
        self._optimizers, self._crossing = list(optimizers), crossing
        self._residents = {weight: Resident(weight) for each in optimizers for weight in weights_of(each)}
        self._residents |= {weight: Lodger(weight, each, crossing) for weight, each in (lodgings or {}).items()}
        self._residents |= residents or {}
        sizes = {weight: weight.numel() * each for one, each in optimizers.items() for weight in weights_of(one)}
        #: Those whose state is on the host.
        self.weights = choose(sizes, fraction, lodgings or ())
        #: What will be there once all of them have been updated.
        self.planned_bytes = round(sum(sizes[each] for each in self.weights))
        slot_bytes = SLOT_BYTES * (_LARGER_IF_PACED if paced else 1)
        self._rounds = [
            one
            for each, number_bytes in optimizers.items()
            for one in plan_rounds(each, self.weights, max(int(slot_bytes // max(number_bytes, 1.0)), 1))
        ]
        self._num_visits = Counter(visit.weight for each in self._rounds for visit in each.visits)
        self._rounds_of: dict[nn.Parameter, list[Round]] = {}
        for each in self._rounds:
            for weight in each.weights:
                self._rounds_of.setdefault(weight, []).append(each)
        self._may_grow = visiting_bytes is None
        self._slots = Slots(NUM_SLOTS, crossing)
        if visiting_bytes is not None:
            size = max((each.num_bytes(optimizers[each.optimizer]) for each in self._rounds), default=1)
            count = max(_LEAST_SLOTS, visiting_bytes // size)
            self._slots = Slots(min(count, len(self._rounds)), crossing)
            self._slots.fill(size)
        #: The learning rate of what is updated from now on; the optimizers' own if it is None.
        self.rate: float | None = None
        self._homes: dict[nn.Parameter, dict[str, Tensor]] = {}
        #: Of weights that were updated in part, how many visits are left, and what the optimizers keep of them then.
        self._left: dict[nn.Parameter, int] = {}
        self._told: dict[nn.Parameter, dict[str, Any]] = {}
        #: When weights that were updated are new.
        self._renewed: dict[nn.Parameter, list[Event]] = {}
        self._visits: Visits[Round] = (PacedVisits if paced else Visits)(self, self._rounds, self._slots, crossing)

    @property
    def num_bytes(self) -> int:
        """What is on the host now."""
        return sum(each.nbytes for homes in self._homes.values() for each in homes.values())

    @property
    def error(self) -> Exception | None:
        """What went wrong beside the caller, if anything did."""
        return self._visits.error

    def begin(self) -> None:
        """A step begins: the first states come, under its forwards and backwards."""
        with self._visits.lock:
            if any(value is not self._homes.get(weight, {}).get(key) for _, weight, key, value in self._entries()):
                self.take_home()
            if not self._visits.is_open:
                for each in self._rounds:
                    each.missing = each.weights
                self._grow()
            self._visits.begin()

    @torch.no_grad()
    def ready(self, weights: Iterable[nn.Parameter]) -> None:
        """The gradients of these weights are final: update them as soon as their state is here."""
        found: dict[Round, None] = {}
        for weight in weights:
            for each in self._rounds_of.get(weight, ()):
                each.missing.discard(weight)
                if not each.missing:
                    found[each] = None
        self._ask(found)

    @torch.no_grad()
    def step(self) -> None:
        """End a step: all weights are updated that have a gradient, or will be beside what is computed next."""
        self.begin()
        for optimizer in self._optimizers:
            stay = [[each for each in group["params"] if each not in self.weights] for group in optimizer.param_groups]
            if any(each.grad is not None for params in stay for each in params):
                with only(optimizer, stay):
                    optimizer.step()
        self._ask(
            each
            for each in self._rounds
            if each not in self._visits.given and any(self._residents[one].has_gradient for one in each.weights)
        )
        self._visits.end()

    def settle(self, weights: Iterable[nn.Parameter]) -> None:
        """Have all updates put of some weights that were asked for."""
        self._visits.settle([each for weight in weights for each in self._rounds_of.get(weight, ())])

    def follow(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """What is computed from now on comes after the updates of some weights, or of all."""
        found = list(self._rounds_of) if weights is None else list(weights)
        self.settle(found)
        for weight in found:
            for mark in self._renewed.pop(weight, ()):
                self._crossing.follow(mark)

    def wait(self) -> None:
        """Wait until all state is on the host, and what is computed from now on uses the new weights."""
        self.follow()
        self._visits.wait()

    @torch.no_grad()
    def take_home(self) -> None:
        """State was perhaps put into the optimizers from outside: it goes to the host, and what is coming is old."""
        self.wait()
        self._visits.forget()
        self._left.clear()
        self._told.clear()
        kept: dict[nn.Parameter, dict[str, Tensor]] = {}
        foreign: dict[nn.Parameter, list[tuple[Optimizer, str, Tensor]]] = {}
        for optimizer, weight, key, value in self._entries():
            if value is self._homes.get(weight, {}).get(key):
                kept.setdefault(weight, {})[key] = value
            else:
                foreign.setdefault(weight, []).append((optimizer, key, value))
        self._homes = kept
        for each in self._rounds:
            own = [(visit.weight, *entry) for visit in each.visits for entry in foreign.pop(visit.weight, ())]
            self._make_homes({(weight, key): value for weight, _, key, value in own})
            for weight, optimizer, key, value in own:
                optimizer.state[weight][key] = self._homes[weight][key].copy_(value)

    def close(self) -> None:
        """Let go of the slots. The state stays where it is."""
        self.follow()
        self._visits.close()

    # What `Visits` asks.

    def homes_of(self, one: Round) -> Homes:
        """Where lives what comes to a round. In the step that makes a weight's state, there is none yet."""
        coming: dict[tuple[int, str], Tensor] = {}
        room: dict[tuple[int, str], Tensor] = {}
        residents = [self._residents[visit.weight] for visit in one.visits]
        for number, visit in enumerate(one.visits):
            coming |= {(number, key): home for key, home in residents[number].homes(visit).items()}
            room |= {(number, key): like for key, like in residents[number].room(visit).items()}
        for number, visit in enumerate(one.visits):
            if one.optimizer.state.get(visit.weight):
                homes = self._homes.get(visit.weight, {})
                coming |= {(number, key): visit.of(home) for key, home in homes.items()}
        one.lies = [*coming, *room]
        return Homes(list(coming.values()), list(room.values()))

    def update(self, one: Round, here: list[Tensor], after: list[Event]) -> Written:
        """Have a round's weights stepped on, as far as they have gradients."""
        places: list[dict[str, Tensor]] = [{} for _ in one.visits]
        for (number, key), place in zip(one.lies, here, strict=True):
            places[number][key] = place
        visits = [
            (visit, each)
            for visit, each in zip(one.visits, places, strict=True)
            if self._residents[visit.weight].has_gradient
        ]
        if not visits:
            return Written([], [])
        brought = [mark for visit, each in visits for mark in self._residents[visit.weight].bring(visit, each)]
        leaving: list[tuple[Tensor, Tensor]] = []
        marks = self._crossing.apart(partial(self._run, one, visits, leaving), [*after, *brought[-1:]])
        for weight in {visit.weight for visit, _ in visits}:
            if self._residents[weight].is_here:
                self._renewed.setdefault(weight, []).extend(marks)
        return Written(marks, leaving)

    def is_sent(self, one: Round, marks: list[Event]) -> None:
        """Tell those that live on the host."""
        for weight in one.weights:
            if self._residents[weight].has_gradient:
                self._residents[weight].is_sent(marks)

    # ---------------------------------------------------------------------------------------------------------------

    def _ask(self, rounds: Iterable[Round]) -> None:
        found = list(rounds)
        self._visits.settle(found)
        for each in found:
            each.rate = self.rate
        self._visits.ask(found)

    def _entries(self) -> Iterator[tuple[Optimizer, nn.Parameter, str, Tensor]]:
        """What optimizers keep of weights whose state is on the host, but for single numbers: these are anywhere."""
        for optimizer in self._optimizers:
            for weight in weights_of(optimizer):
                for key, value in optimizer.state.get(weight, {}).items() if weight in self.weights else ():
                    if isinstance(value, Tensor) and value.dim():
                        yield optimizer, weight, key, value

    def _grow(self) -> None:
        """Have more slots, when it is known what a step needs of the device beside them."""
        if self._may_grow and self._homes:
            self._may_grow = False
            homes = [self.homes_of(each) for each in self._rounds]
            largest = max(size_of([*each.coming, *each.room]) for each in homes)
            self._slots.grow(min(NUM_SLOTS + spare_bytes(self._crossing.device) // max(largest, 1), len(homes)))

    @torch.no_grad()
    def _run(self, one: Round, visits: Sequence[tuple[Visit, Places]], leaving: list[tuple[Tensor, Tensor]]) -> None:
        """Step on what is here, and say what goes home."""
        optimizer = one.optimizer
        residents = [self._residents[visit.weight] for visit, _ in visits]
        substitutes = [
            Substitute(visit.weight, resident.visitor(visit, places), self._state_of(optimizer, visit, places))
            for resident, (visit, places) in zip(residents, visits, strict=True)
        ]
        set_rate(optimizer, one.rate)
        states = step_on(optimizer, substitutes)
        for resident, (visit, places) in zip(residents, visits, strict=True):
            resident.finish(visit, places)
            leaving += resident.leaving(visit, places)
        leaving += self._keep(visits, states)
        for visit, _ in visits:
            self._has_passed(optimizer, visit.weight)

    def _state_of(self, optimizer: Optimizer, visit: Visit, places: Places) -> dict[str, Any]:
        """What an optimizer has of a visit. Parts of one weight all begin with the same count of steps."""
        kept = optimizer.state.get(visit.weight, {})
        return {key: places[key] if key in places else _own(each) for key, each in kept.items()}

    def _keep(
        self, visits: Sequence[tuple[Visit, Places]], states: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Have what optimizers keep of visits told when all of a weight was updated; what of it goes home."""
        new = {
            (visit.weight, key): value
            for (visit, _), state in zip(visits, states, strict=True)
            for key, value in state.items()
            if is_many(value) and key not in self._homes.get(visit.weight, {})
        }
        self._make_homes(new)
        for (visit, _), state in zip(visits, states, strict=True):
            entries = self._told.setdefault(visit.weight, {}) if state else {}
            for key, value in state.items():
                entries[key] = self._homes[visit.weight][key] if is_many(value) else value
                if is_many(value):
                    yield visit.of(entries[key]), value.contiguous()

    def _make_homes(self, likes: Mapping[tuple[nn.Parameter, str], Tensor]) -> None:
        """Memory for entries of weights' states, like these; of those that are cut, some rows may be given.

        What comes whole lies behind each other. Behind rows there are others, and no padding.
        """
        together: dict[tuple[nn.Parameter, str], Tensor] = {}
        for (weight, key), like in likes.items():
            if self._num_visits[weight] == 1:
                together[weight, key] = like
            else:
                self._homes.setdefault(weight, {})[key] = self._crossing.pinned(weight.shape, like.dtype)
        if together:
            memory = self._crossing.pinned((size_of(together.values()),), torch.uint8)
            for (weight, key), home in zip(together, lay_out(memory, together.values()), strict=True):
                self._homes.setdefault(weight, {})[key] = home

    def _has_passed(self, optimizer: Optimizer, weight: nn.Parameter) -> None:
        """A visit of a weight was updated. With the last of them, all of it was."""
        self._left[weight] = self._left.get(weight, self._num_visits[weight]) - 1
        if not self._left[weight]:
            del self._left[weight]
            self._residents[weight].end()
            if weight in self._told:
                optimizer.state[weight] = self._told.pop(weight)


def _own(value: Any) -> Any:
    """A count of steps, say, for a part of a weight: it is counted up there."""
    return value.clone() if isinstance(value, Tensor) else value
