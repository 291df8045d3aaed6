"""Optimizers whose state comes to the device: weights and state are those of the plain optimizer, bit for bit."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from shardwise.states.muon import Muon
from shardwise.states.parameter_group import number_bytes_of
from shardwise.states.tiers import host_states as states
from shardwise.states.tiers.choose_offloaded import choose_last
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_states import HostStates
from tests.states.tiers.late import LateCopyStreams

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
SHAPES = ((6, 4), (5,), (7, 3), (4, 4), (2, 3, 2), ())
STEPS = 4


@pytest.fixture(params=["small buffers", "small buffers, late copies", "large buffers, late copies"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyStreams]:
    """With small buffers weights are cut into rows, and take more chunks than there are buffers."""
    monkeypatch.setattr(states, "STAGING_BYTES", 64 if request.param.startswith("small") else 2**20)
    monkeypatch.setattr(states, "NUM_STAGING_BUFFERS", 2)
    found = LateCopyStreams(seed=0) if "late" in request.param else CopyStreams(torch.device("cpu"))
    yield found
    found.close()


def by_dim(parameters: Iterable[nn.Parameter]) -> Optimizer:
    every = list(parameters)
    flat, others = [each for each in every if each.dim() < 2], [each for each in every if each.dim() >= 2]
    return AdamW([{"params": flat, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.3}], lr=1e-2)


def adagrad(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-2, momentum=0.9)


def amsgrad(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-2, amsgrad=True)


MAKERS: dict[str, Make] = {
    "adamw in groups": by_dim,
    "amsgrad": amsgrad,
    "sgd": momentum,
    "plain sgd": lambda some: SGD(some, lr=1e-2),
    "adagrad": adagrad,
    "adafactor": lambda some: Adafactor(some, lr=1e-2),
    "fused": lambda some: AdamW(some, lr=1e-2, fused=True),
}


def make_weights(shapes: Iterable[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=chance)) for shape in shapes]


def give_gradients(weights: list[nn.Parameter], step: int, without: Iterable[int] = ()) -> None:
    chance = torch.Generator().manual_seed(100 + step)
    for number, each in enumerate(weights):
        gradient = torch.randn(each.shape, generator=chance)
        each.grad = None if number in without else gradient


def on_host(
    optimizer: Optimizer, make: Make, weights: list[nn.Parameter], copies: CopyStreams, part: float
) -> HostStates:
    return HostStates({optimizer: number_bytes_of(make, weights)}, part, copies)


def assert_same(ours: Optimizer, theirs: Optimizer) -> None:
    one, other = ours.state_dict(), theirs.state_dict()
    # A fused update has its last few numbers apart from those that fill a vector, and may round them otherwise: which
    # these are depends on where a tensor is cut.
    is_fused = bool(ours.param_groups[0].get("fused"))

    def same(mine: Tensor, value: Tensor) -> bool:
        return torch.allclose(mine, value, rtol=1e-6, atol=0.0) if is_fused else torch.equal(mine, value)

    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, entries in other["state"].items():
        assert one["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            mine = one["state"][number][key]
            assert same(mine, value) if isinstance(value, Tensor) else mine == value, (number, key)
    for group, another in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert all(same(a, b) for a, b in zip(group["params"], another["params"], strict=True))


@pytest.mark.parametrize("part", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_and_state_are_those_of_the_plain_optimizer(name: str, part: float, copies: CopyStreams) -> None:
    make = MAKERS[name]
    ours, theirs = make_weights(), make_weights()
    optimizer, plain = make(ours), make(theirs)
    host = on_host(optimizer, make, ours, copies, part)
    for step in range(STEPS):
        for weights, each in ((ours, optimizer), (theirs, plain)):
            give_gradients(weights, step, without=[step % 3])
            each.param_groups[0]["lr"] = 1e-2 / (1 + step)
        host.begin()
        host.step()
        plain.step()
    host.wait()
    assert_same(optimizer, plain)


def test_matrices_are_orthogonalised_whole(copies: CopyStreams) -> None:
    def make(some: Iterable[nn.Parameter]) -> Optimizer:
        return Muon(some, lr=1e-2)

    ours, theirs = (make_weights([(6, 4), (4, 4), (3, 9)]) for _ in range(2))
    optimizer, plain = make(ours), make(theirs)
    host = on_host(optimizer, make, ours, copies, 1.0)
    for step in range(STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        host.step()
        plain.step()
    host.wait()
    assert_same(optimizer, plain)


def test_what_is_on_the_host_is_at_least_the_part_that_was_asked_for(copies: CopyStreams) -> None:
    weights = make_weights([(10, 10)] * 10)
    optimizer = AdamW(weights)
    host = on_host(optimizer, AdamW, weights, copies, 0.35)
    assert host.planned_bytes == 4 * 100 * 8
    assert host.num_bytes == 0
    give_gradients(weights, 0)
    host.step()
    assert host.num_bytes == host.planned_bytes
    for size in range(1, 12):
        sizes = {each: float(size + number % 3) for number, each in enumerate(weights)}
        for part in (0.0, 0.2, 0.5, 0.9, 1.0):
            chosen = sum(sizes[each] for each in choose_last(sizes, part))
            assert part * sum(sizes.values()) <= chosen + 1e-9 <= part * sum(sizes.values()) + max(sizes.values())


def test_state_that_is_loaded_from_outside_is_taken_to_the_host(copies: CopyStreams) -> None:
    ours, theirs = make_weights(), make_weights()
    optimizer, plain = by_dim(ours), by_dim(theirs)
    host = on_host(optimizer, by_dim, ours, copies, 1.0)
    for step in range(STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        host.begin()  # What is on its way then is old.
        saved: dict[str, Any] = copy.deepcopy(plain.state_dict())
        optimizer.load_state_dict(saved)
        host.step()
        plain.step()
    host.wait()
    assert_same(optimizer, plain)
    assert host.num_bytes == sum(each.numel() for each in ours if each.dim()) * 8


def test_a_step_that_is_left_out_leaves_the_state_alone(copies: CopyStreams) -> None:
    ours, theirs = make_weights(), make_weights()
    optimizer, plain = momentum(ours), momentum(theirs)
    host = on_host(optimizer, momentum, ours, copies, 1.0)
    for step in range(STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        host.begin()
        if step != 1:
            host.step()
            plain.step()
    host.wait()
    assert_same(optimizer, plain)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(AdamW, 8.0), (amsgrad, 12.0), (momentum, 4.0), (lambda some: SGD(some, lr=0.1), 0.0), (adagrad, 4.0)],
)
def test_the_bytes_of_a_number_are_seen_by_stepping(make: Make, expected: float) -> None:
    assert number_bytes_of(make, make_weights()) == expected
