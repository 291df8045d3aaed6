"""Optimizer state that lives on the host and is copied to the device when its weights are updated.

A chunk is updated when the caller reports that the gradients of its weights are final, or at the end of the step;
`state_prefetch.py` has copied its state by then. On a GPU this runs beside computation, and `follow` orders the users
of a weight after its update.

Between two steps an optimizer looks as always: `optimizer.state` has an entry for each weight, some with tensors on the
host. So code that saves it, loads it or changes its settings need not know. The optimizer steps on the weights whose
state is staged: several small ones at once, a large one in parts if its rule is elementwise. The device does the
arithmetic: the results are bitwise those of the plain optimizer.

A weight may itself live on the host, and its gradient: `residency.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cost.memory import NUM_STAGING_BUFFERS, STAGING_BYTES
from shardwise.dataflow.streams import Event
from shardwise.ranks.exchange import Ticket
from shardwise.states.tiers.choose_offloaded import choose_last
from shardwise.states.tiers.chunks import Chunk, Substitute, is_many, only, plan_chunks, step_on, weights_of
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import Packing
from shardwise.states.tiers.residency import HostResidency, OffloadedWeight, Places, Residency, WeightSlice
from shardwise.states.tiers.staging import StagingBuffers, spare_bytes
from shardwise.states.tiers.state_prefetch import Incoming, StatePrefetch, Written
from shardwise.states.tiers.step_numbers import StepNumbers
from shardwise.states.tiers.threaded_prefetch import ThreadedStatePrefetch
from shardwise.states.tiers.weight_state import WeightState, allocate, take_to_host

#: One chunk in transit to the device, one being updated, one in transit back.
_LEAST_BUFFERS = 3

#: The factor on the size of staging buffers if threads launch copies: the link idles between two copies, whatever their
#: size (Llama-3B on an H200: 17,100 tokens/s, and 16,300 with chunks half as large).
_LARGER_IF_THREADED = 2


#: The limit if weights use the same link: prefetched state delays the first units (Llama-3B on an H200, the batch at
#: once: 14,700 tokens/s, and 13,900 with as many buffers as there was memory for).
_MOST_BESIDE_WEIGHTS = 8


class HostStates:
    """The state of a part of the weights of some optimizers, on the host.

    `optimizers` are given with their bytes of state per element. `fraction` is the least share of all state on the
    host; the state that stays is that of the first weights in order, as far as it fits. The state of weights that live
    on the host themselves, `offloaded`, is there in any case. `residencies` override how some weights are copied.

    `staging_bytes` of the device are for staging. By default that is what plans count, and from the second step on also
    part of the memory that was never used. `threaded`: optimizers may be stepped by other threads than the caller's.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, float],
        fraction: float,
        copies: CopyStreams,
        offloaded: Mapping[nn.Parameter, OffloadedWeight] | None = None,
        *,
        residencies: Mapping[nn.Parameter, Residency] | None = None,
        staging_bytes: int | None = None,
        threaded: bool = False,
    ) -> None:
        self._optimizers, self._copies = list(optimizers), copies
        sizes = {weight: weight.numel() * each for one, each in optimizers.items() for weight in weights_of(one)}
        #: The weights whose state is on the host.
        self.weights = choose_last(sizes, fraction, offloaded or ())
        #: The bytes there once all of them have been updated.
        self.planned_bytes = round(sum(sizes[each] for each in self.weights))
        known: dict[nn.Parameter, Residency] = {
            weight: HostResidency(weight, each, copies) for weight, each in (offloaded or {}).items()
        }
        known.update(residencies or {})
        self._states = {
            weight: WeightState(each, known.get(weight) or Residency(weight))
            for each in optimizers
            for weight in weights_of(each)
            if weight in self.weights
        }
        self._chunks = self._plan(optimizers, STAGING_BYTES * (_LARGER_IF_THREADED if threaded else 1))
        self._may_grow = staging_bytes is None
        self._buffers = StagingBuffers(NUM_STAGING_BUFFERS, copies)
        if staging_bytes is not None:
            size = max((each.num_bytes(optimizers[each.optimizer]) for each in self._chunks), default=1)
            count = max(_LEAST_BUFFERS, staging_bytes // size)
            self._buffers = StagingBuffers(min(count, len(self._chunks)), copies)
            self._buffers.fill(size)
        self._numbers = {each: StepNumbers(each) for each in optimizers}
        self._step = 0
        #: Tickets that follow updates of some weights with more work: waiting for all updates includes these.
        self.followers: Sequence[Ticket] = ()
        #: The learning rate of later updates; the optimizers' own if it is None.
        self.rate: float | None = None
        kind = ThreadedStatePrefetch if threaded else StatePrefetch
        self._prefetch: StatePrefetch[Chunk] = kind(self, self._chunks, self._buffers, copies)

    @property
    def num_bytes(self) -> int:
        """The bytes on the host now."""
        return sum(each.nbytes for state in self._states.values() for each in state.host.values())

    @property
    def error(self) -> Exception | None:
        """The error of a background thread, if there was one."""
        return self._prefetch.error

    def begin(self) -> None:
        """Begin a step: start to prefetch the first states, during its forwards and backwards."""
        with self._prefetch.lock:
            if any(state.has_foreign for state in self._states.values()):
                self.take_home()
            if not self._prefetch.is_open:
                self._step += 1
                for each in self._chunks:
                    each.missing = each.weights
                self._grow()
            self._prefetch.begin()

    @torch.no_grad()
    def ready(self, weights: Iterable[nn.Parameter]) -> None:
        """Update these weights as soon as their state is here: their gradients are final."""
        found: dict[Chunk, None] = {}
        for weight in weights:
            for each in self._states[weight].chunks if weight in self._states else ():
                each.missing.discard(weight)
                if not each.missing:
                    found[each] = None
        self._ask(found)

    @torch.no_grad()
    def step(self) -> None:
        """End a step: all weights with a gradient are updated, or will be beside later computation."""
        self.begin()
        for optimizer in self._optimizers:
            stay = [[each for each in group["params"] if each not in self.weights] for group in optimizer.param_groups]
            if any(each.grad is not None for params in stay for each in params):
                with only(optimizer, stay), self._numbers[optimizer].call(self._step):
                    optimizer.step()
        self._ask(
            each
            for each in self._chunks
            if not self._prefetch.was_asked(each) and any(self._has_gradient(one) for one in each.weights)
        )
        self._prefetch.end()

    def settle(self, weights: Iterable[nn.Parameter]) -> None:
        """Launch all requested updates of some weights."""
        self._prefetch.settle(
            [each for weight in weights if weight in self._states for each in self._states[weight].chunks]
        )

    def follow(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Order later computation after the updates of some weights, or of all."""
        found = list(self._states) if weights is None else [each for each in weights if each in self._states]
        self.settle(found)
        for state in [self._states[weight] for weight in found]:
            events, state.renewed = state.renewed, []
            for event in events:
                self._copies.follow(event)

    def wait(self) -> None:
        """Wait until all state is on the host. Later computation uses the new weights."""
        self.follow()
        for each in self.followers:
            each.wait()
        self._prefetch.wait()

    def take_home(self) -> None:
        """Send state to the host that may have been loaded into the optimizers from outside; drop prefetched state."""
        self.wait()
        self._prefetch.forget()
        taken: set[nn.Parameter] = set()
        for each in self._chunks:  # By chunk: what is copied together is packed together.
            own = [part.weight for part in each.parts if part.weight not in taken]
            taken.update(own)
            take_to_host([self._states[weight] for weight in own], self._copies)

    def close(self) -> None:
        """Release the staging buffers. The state stays where it is."""
        self.follow()
        self._prefetch.close()

    # Called by the prefetch.

    def incoming(self, one: Chunk) -> Incoming:
        """Return what is copied for a chunk: weights that live on the host, then states, then space for later
        values."""
        coming: dict[tuple[int, str], Tensor] = {}
        reserved: dict[tuple[int, str], Tensor] = {}
        states = [self._states[part.weight] for part in one.parts]
        for number, (part, state) in enumerate(zip(one.parts, states, strict=True)):
            coming |= {(number, key): each for key, each in state.residency.incoming(part).items()}
            reserved |= {(number, key): each for key, each in state.residency.reserved(part).items()}
        for number, (part, state) in enumerate(zip(one.parts, states, strict=True)):
            coming |= {(number, key): each for key, each in state.staged(part).items()}
        one.staged = [*coming, *reserved]
        return Incoming(list(coming.values()), list(reserved.values()))

    def update(self, one: Chunk, here: list[Tensor], after: list[Event]) -> Written:
        """Step on a chunk's weights that have gradients."""
        places: list[dict[str, Tensor]] = [{} for _ in one.parts]
        for (number, key), place in zip(one.staged, here, strict=True):
            places[number][key] = place
        staged = [each for each in zip(one.parts, places, strict=True) if self._has_gradient(each[0].weight)]
        if not staged:
            return Written([], [])
        brought = [
            event for part, each in staged for event in self._states[part.weight].residency.bring(part, each)
        ]  # fmt: skip
        outgoing: list[tuple[Tensor, Tensor]] = []
        weights: list[tuple[Tensor, Tensor]] = []
        events = self._copies.run_after(partial(self._run, one, staged, weights, outgoing), [*after, *brought])
        for state in {self._states[part.weight] for part, _ in staged}:
            if state.residency.is_on_device:
                state.renewed.extend(events)
        return Written(events, [*weights, *outgoing], [here for _, here in weights], len(weights))

    def is_sent(self, one: Chunk, events: list[Event]) -> None:
        """Notify the weights that live on the host."""
        for weight in one.weights:
            if self._has_gradient(weight):
                self._states[weight].residency.is_sent(events)

    # ---------------------------------------------------------------------------------------------------------------

    def _plan(self, optimizers: Mapping[Optimizer, float], buffer_bytes: int) -> list[Chunk]:
        found = [
            one
            for each, number_bytes in optimizers.items()
            for one in plan_chunks(each, self.weights, max(int(buffer_bytes // max(number_bytes, 1.0)), 1))
        ]
        for one in found:
            for part in one.parts:
                self._states[part.weight].chunks.append(one)
        return found

    def _has_gradient(self, weight: nn.Parameter) -> bool:
        return self._states[weight].residency.has_gradient

    def _ask(self, chunks: Iterable[Chunk]) -> None:
        found = list(chunks)
        self._prefetch.settle(found)
        for each in found:
            each.rate, each.step = self.rate, self._step
        self._prefetch.ask(found)

    def _grow(self) -> None:
        """Add staging buffers, once the memory that a step needs on the device is known."""
        if self._may_grow and any(state.host for state in self._states.values()):
            self._may_grow = False
            every = [self.incoming(each) for each in self._chunks]
            largest = max(Packing.of([*each.host, *each.reserved]).num_bytes for each in every)
            comes_with_weights = any(isinstance(state.residency, HostResidency) for state in self._states.values())
            most = min(len(every), _MOST_BESIDE_WEIGHTS if comes_with_weights else len(every))
            self._buffers.grow(min(NUM_STAGING_BUFFERS + spare_bytes(self._copies.device) // max(largest, 1), most))

    @torch.no_grad()
    def _run(
        self,
        one: Chunk,
        staged: Sequence[tuple[WeightSlice, Places]],
        weights: list[tuple[Tensor, Tensor]],
        outgoing: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Step on what is here, and return what is copied back, of weights and of states."""
        states = [self._states[part.weight] for part, _ in staged]
        substitutes = [
            Substitute(part.weight, state.residency.stand_in(part, places), state.given(places))
            for state, (part, places) in zip(states, staged, strict=True)
        ]
        with self._numbers[one.optimizer].call(one.step):
            found = step_on(one.optimizer, one.rate, substitutes)
        for state, (part, places) in zip(states, staged, strict=True):
            state.residency.finish(part, places)
            weights += state.residency.outgoing(part, places)
        new = [
            (state, key, value)
            for state, entries in zip(states, found, strict=True)
            for key, value in entries.items()
            if is_many(value) and key not in state.host
        ]
        allocate(new, self._copies)
        for state, (part, _), entries in zip(states, staged, found, strict=True):
            outgoing += state.take(part, entries)
        for state in states:
            state.part_is_updated()
