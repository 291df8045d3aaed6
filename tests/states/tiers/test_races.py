"""State that is staged on a device: whatever touches the same memory in two streams is put in an order by waits."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers import host_states as states
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.residency import HandedGradient, MasterWeight
from shardwise.states.tiers.state_prefetch import StatePrefetch
from shardwise.states.tiers.swapped_storage import HostStorage, Presence
from tests.states.tiers.races import RacyCopyStreams

STEPS = 4


def make_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5,), (7, 3), (4, 4), (3, 2, 2))
    ]


def rehearse(
    states_of: HostStates, copies: RacyCopyStreams, parameters: list[nn.Parameter], die: random.Random
) -> None:
    """Steps as an engine takes them: forwards that follow, backwards that say when a gradient is final."""
    weights = parameters
    for _ in range(STEPS):
        states_of.begin()
        for weight in weights:
            states_of.follow([weight])
            copies.compute(reads=[weight])
        order = list(reversed(weights)) if die.random() < 0.7 else die.sample(weights, len(weights))
        late = die.random() < 0.3
        for weight in order:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(die.randint(0, 99)))
            copies.compute(reads=[weight], writes=[weight.grad])
            if not late and die.random() < 0.9:
                states_of.ready([weight])
        states_of.step()
    states_of.wait()
    copies.compute(reads=weights)


@pytest.mark.parametrize("seed", range(12))
def test_an_engines_updates_are_ordered(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    die = random.Random(seed)
    monkeypatch.setattr(states, "STAGING_BYTES", die.choice([64, 200, 2**20]))
    monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", die.choice([1, 2, 4]))
    copies, weights = RacyCopyStreams(seed), make_weights()
    plain = [nn.Parameter(each.detach().clone()) for each in weights]
    optimizer, other = (AdamW(each, lr=1e-2) for each in (weights, plain))
    host = HostStates({optimizer: 8.0}, die.choice([1.0, 1.0, 0.5]), copies)
    step = host.step

    def both() -> None:
        for one, another in zip(plain, weights, strict=True):
            assert another.grad is not None
            one.grad = another.grad.clone()
        step()
        other.step()

    host.step = both  # type: ignore[method-assign]
    rehearse(host, copies, weights, die)
    assert all(torch.equal(one, another) for one, another in zip(weights, plain, strict=True))
    host.close()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_updates_of_masters_are_ordered_whoever_tells_the_device(
    seed: int, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = random.Random(seed)
    monkeypatch.setattr(states, "STAGING_BYTES", die.choice([64, 200, 2**20]))
    copies, parameters = RacyCopyStreams(seed), [nn.Parameter(each.detach().bfloat16()) for each in make_weights()]
    residencies: list[HandedGradient] = [
        MasterWeight(nn.Parameter(each.detach().float()), each) for each in parameters[:3]
    ]
    residencies += [HandedGradient(each, each) for each in parameters[3:]]
    optimizer = AdamW([each.weight for each in residencies], lr=1e-2)
    host = HostStates(
        {optimizer: 12.0},
        1.0,
        copies,
        residencies={each.weight: each for each in residencies},
        staging_bytes=die.choice([1, 10**6]),
        threaded=threaded,
    )
    host.begin()
    for _ in range(STEPS):
        for each in residencies:
            host.follow([each.weight])
            copies.compute(reads=[each.parameter])
        for each in die.sample(residencies, len(residencies)):
            gradient = torch.randn(each.parameter.shape).bfloat16()
            copies.compute(reads=[each.parameter], writes=[gradient])
            host.settle([each.weight])
            each.take(gradient, die.choice([None, 0.5]))
            host.ready([each.weight])
        host.step()
        host.begin()
    host.wait()
    copies.compute(reads=parameters)
    assert host.error is None, host.error
    host.close()


class Offloaded:
    """A weight that lives on the host with its gradient, and comes for each use."""

    has_gradient, scale = False, 0.5
    hands_over_weight = hands_over_gradient = False
    gradient_here: Tensor | None = None
    weight_here: Tensor

    def __init__(self, weight: nn.Parameter, copies: RacyCopyStreams) -> None:
        self._copies = copies
        self.host, self.gradient = weight.detach().clone(), torch.empty_like(weight)
        self.sent: list[Event] = []
        self._renewed: list[Event] = []

    def hold(self) -> bool:
        raise AssertionError("nothing is handed over")

    def is_updated(self) -> None:
        """Nobody waits for that."""

    def is_renewed(self, events: Sequence[Event]) -> None:
        self._renewed += events

    def use(self) -> None:
        here = torch.empty_like(self.host)
        self._copies.follow(self._copies.to_device(here, self.host, [*self._renewed, *self._copies.computed()]))
        self._copies.compute(reads=[here])
        self._renewed.clear()

    def send(self, gradient: Tensor) -> None:
        self._copies.compute(writes=[gradient])
        self.sent, self.has_gradient = [self._copies.to_host(self.gradient, gradient, self.sent)], True


@pytest.mark.parametrize("seed", range(6))
def test_updates_of_weights_that_live_on_the_host_are_ordered(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    die = random.Random(seed)
    monkeypatch.setattr(states, "STAGING_BYTES", die.choice([64, 2**20]))
    monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", die.choice([1, 3]))
    copies, weights = RacyCopyStreams(seed), make_weights()
    plain = [nn.Parameter(each.detach().clone()) for each in weights]
    offloaded = {each: Offloaded(each, copies) for each in weights}
    host, other = HostStates({AdamW(weights): 8.0}, 0.0, copies, offloaded), AdamW(plain)
    for _ in range(STEPS):
        host.begin()
        for each in weights:
            offloaded[each].use()
        for number in reversed(range(len(weights))):
            gradient = torch.randn(weights[number].shape)
            plain[number].grad = gradient * 0.5
            offloaded[weights[number]].send(gradient)
            if die.random() < 0.8:
                host.ready([weights[number]])
        host.step()
        other.step()
    host.wait()
    assert all(torch.equal(offloaded[one].host, another) for one, another in zip(weights, plain, strict=True))
    host.close()


class BookedStorage(HostStorage):
    """Whoever computes next may write to memory that was given back: that is noted."""

    def _take_memory(self) -> None:
        """It is there."""

    def _give_memory(self) -> None:
        assert isinstance(self._copies, RacyCopyStreams)
        self._copies.compute(writes=[self.device])


class HandedOver:
    """A weight that lives on the host, and is updated where its backward has had it."""

    scale = 0.5
    hands_over_weight = hands_over_gradient = True

    def __init__(self, weight: nn.Parameter, copies: RacyCopyStreams, leaving: DeferredFree) -> None:
        self._copies, self._leaving = copies, leaving
        self.storage = BookedStorage(weight.detach().clone(), copies, leaving)
        self.gradient = torch.empty_like(weight)
        self.sent: list[Event] = []
        self.has_gradient = False
        self.gradient_here: Tensor | None = None

    @property
    def host(self) -> Tensor:
        return self.storage.host

    @property
    def weight_here(self) -> Tensor:
        return self.storage.device

    def hold(self) -> bool:
        was_here = self.storage.state is Presence.HERE
        self.storage.follow()
        return was_here

    def is_renewed(self, events: Sequence[Event]) -> None:
        self.storage.is_written(events)
        self.sent = [*self.sent, *events]

    def is_updated(self) -> None:
        self.storage.leave()
        self.gradient_here = None

    def use(self) -> None:
        self.storage.follow()
        self._copies.compute(reads=[self.storage.device])
        self.storage.leave()

    def backward(self, gradient: Tensor, *, stays: bool) -> None:
        self.storage.follow()
        self._copies.compute(reads=[self.storage.device], writes=[gradient])
        self.sent, self.has_gradient = [self._copies.to_host(self.gradient, gradient, self.sent)], True
        self._leaving.hold(self.sent[0], gradient)
        if stays:
            self.gradient_here = gradient
        else:
            self.storage.leave()


@pytest.mark.parametrize("seed", range(12))
def test_updates_where_a_backward_has_left_weight_and_gradient_are_ordered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = random.Random(seed)
    monkeypatch.setattr(states, "STAGING_BYTES", die.choice([64, 200, 2**20]))
    monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", die.choice([1, 3]))
    copies, weights = RacyCopyStreams(seed), make_weights()
    beside, leaving = RacyCopyStreams(seed, beside=copies), DeferredFree(die.choice([0, 100, 10**6]))
    plain = [nn.Parameter(each.detach().clone()) for each in weights]
    offloaded = {each: HandedOver(each, copies, leaving) for each in weights}
    host, other = HostStates({AdamW(weights): 8.0}, 0.0, beside, offloaded), AdamW(plain)
    for _ in range(STEPS):
        host.begin()
        for each in weights:
            offloaded[each].use()
        for number in reversed(range(len(weights))):
            gradient = torch.randn(weights[number].shape)
            plain[number].grad = gradient * 0.5
            offloaded[weights[number]].backward(gradient, stays=die.random() < 0.7)
            if die.random() < 0.8:
                host.ready([weights[number]])
        host.step()
        host.follow()
        other.step()
    host.wait()
    for one in offloaded.values():
        one.storage.wait()
    assert all(torch.equal(offloaded[one].host, another) for one, another in zip(weights, plain, strict=True))
    host.close()


class Careless(StatePrefetch[Any]):
    """Forgets to wait for what left a buffer before another one comes."""

    def _bring(self, item: Any) -> None:
        self._buffers._free = type(self._buffers._free)((buffer, []) for buffer, _ in self._buffers._free)
        super()._bring(item)


def test_a_wait_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STAGING_BYTES", 64)
    monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", 2)
    monkeypatch.setattr(states, "StatePrefetch", Careless)
    copies, weights = RacyCopyStreams(0), make_weights()
    host = HostStates({AdamW(weights): 8.0}, 1.0, copies)
    with pytest.raises(AssertionError, match="in does not wait for"):
        rehearse(host, copies, weights, random.Random(0))


def test_a_weight_that_is_used_before_its_update_is_found() -> None:
    copies, weights = RacyCopyStreams(0), make_weights()
    host = HostStates({AdamW(weights): 8.0}, 1.0, copies)
    for _ in range(2):  # The first one waits for memory that the optimizer takes.
        host.follow()
        copies.compute(reads=weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        host.step()
    with pytest.raises(AssertionError, match="compute does not wait for side"):
        copies.compute(reads=weights[:1])
