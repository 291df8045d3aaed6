"""Optimizer state on the host: the weights are those of the plain optimizer, bit for bit, whatever is where."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.states.muon import Muon
from shardwise.states.tiers import HostUpdates
from shardwise.states.tiers import host_states as states
from shardwise.states.tiers import host_updates as updates
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_updates import UpdateBucket, residencies_of
from tests.states.streaming.test_weights import Net

Make = Callable[[Iterable[Tensor]], Optimizer]
STEPS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are cut across parameters, and there are fewer staging buffers than chunks."""
    monkeypatch.setattr(states, "STAGING_BYTES", 12 * 301)
    monkeypatch.setattr(updates, "_staging_bytes", lambda _: 1)


@pytest.fixture
def machine() -> Iterator[Machine]:
    torch.manual_seed(0)
    with Machine(["cpu:0"]) as found:
        yield found


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def adagrad(parameters: Iterable[Tensor]) -> Optimizer:
    return Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1)


def momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=1e-2, momentum=0.9)


def batch_of(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def plainly(net: nn.Module, make: Make, clip: float | None) -> None:
    optimizer = make(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch_of(step)).square().sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("make", [adamw, momentum, adagrad])
@pytest.mark.parametrize("on_host", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_are_those_of_the_plain_optimizer(
    machine: Machine, make: Make, on_host: float, clip: float | None
) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), make, machine, "cpu:0", on_host=on_host, clip=clip)
    for step in range(STEPS):
        net(batch_of(step)).square().sum().backward()
        updates.step()
    updates.close()
    plainly(plain, make, clip)
    assert_same(net, plain)
    assert updates.host_fraction == pytest.approx(on_host, abs=0.15)


def test_gradients_add_up_until_the_last_microbatch(machine: Machine) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), adamw, machine, "cpu:0")
    optimizer = adamw(plain.parameters())
    for step in range(2):
        for number in range(3):
            updates.accumulate(is_last=number == 2)
            net(batch_of(3 * step + number)).square().sum().backward()
            plain(batch_of(3 * step + number)).square().sum().backward()
        updates.step()
        optimizer.step()
        optimizer.zero_grad()
    updates.close()
    assert_same(net, plain)


def test_a_rate_holds_for_the_steps_after_it(machine: Machine) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), adamw, machine, "cpu:0", on_host=0.5)
    optimizer = adamw(plain.parameters())
    for step, rate in enumerate((1e-2, 3e-3, 1e-3)):
        updates.rate = rate
        net(batch_of(step)).square().sum().backward()
        updates.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        plain(batch_of(step)).square().sum().backward()
        optimizer.step()
    updates.close()
    assert_same(net, plain)


def test_a_block_that_was_not_used_is_left_as_it_is(machine: Machine) -> None:
    net = Net(3)
    updates = HostUpdates(net, list(net.blocks), momentum, machine, "cpu:0")
    before = copy.deepcopy(net.blocks[2].state_dict())
    first = [each.detach().clone() for each in net.blocks[0].parameters()]
    x = net.first(batch_of(0))
    net.last(net.blocks[1](net.blocks[0](x))).square().sum().backward()
    updates.step()
    updates.close()
    assert all(torch.equal(each, before[name]) for name, each in net.blocks[2].state_dict().items())
    assert not any(torch.equal(each, other) for each, other in zip(first, net.blocks[0].parameters(), strict=True))


class Moody(nn.Module):
    """Blocks that leave out a different half of their parameters in every step; the first uses one only once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList(torch.randn(9, 4) for _ in range(4)) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.ParameterList)
            for place, weight in enumerate(block):
                if (place + number + step) % 2 and (place or step == 1):
                    x = x + torch.tanh(x @ weight.t()) @ weight
        return x


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("on_host", [1.0, 0.4])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_parameter_without_gradient_is_left_alone_beside_others_that_have_one(
    machine: Machine, make: Make, on_host: float, clip: float | None
) -> None:
    net = Moody()
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), make, machine, "cpu:0", on_host=on_host, clip=clip)
    optimizer = make(plain.parameters())
    for step in range(2 * STEPS):
        net(batch_of(step), step).square().sum().backward()
        updates.step()
        updates.wait()  # Parameters in a list are used without a call that could wait for them.
        optimizer.zero_grad()
        plain(batch_of(step), step).square().sum().backward()
        assert any(each.grad is None for each in plain.blocks[0].parameters())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        assert_same(net, plain)
    updates.close()


def test_tied_weights_are_updated_once(machine: Machine) -> None:
    net = Net()
    one, other = (net.get_submodule(f"blocks.{number}.up") for number in (5, 1))
    one.weight = other.weight
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), adamw, machine, "cpu:0")
    for step in range(STEPS):
        net(batch_of(step)).square().sum().backward()
        updates.step()
    updates.close()
    plainly(plain, adamw, None)
    assert_same(net, plain)


def test_bf16_weights_follow_an_fp32_master(machine: Machine) -> None:
    net = Net().bfloat16()
    master, low = copy.deepcopy(net).float(), copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), adamw, machine, "cpu:0")
    optimizer = adamw(master.parameters())
    for step in range(STEPS):
        net(batch_of(step).bfloat16()).square().sum().backward()
        updates.step()
        low(batch_of(step).bfloat16()).square().sum().backward()
        for one, other in zip(low.parameters(), master.parameters(), strict=True):
            assert one.grad is not None
            other.grad, one.grad = one.grad.float(), None
        optimizer.step()
        for one, other in zip(low.parameters(), master.parameters(), strict=True):
            one.data.copy_(other.data)
    updates.close()
    assert_same(net, low)


def test_what_is_no_fraction_is_refused(machine: Machine) -> None:
    net = Net(2)
    with pytest.raises(ShardwiseError, match="on_host=2 is not a fraction"):
        HostUpdates(net, list(net.blocks), adamw, machine, "cpu:0", on_host=2)


@pytest.mark.parametrize("make", [Adafactor, partial(Muon, lr=1e-2)])
def test_matrices_are_updated_whole(machine: Machine, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STAGING_BYTES", 64)
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net), make, machine, "cpu:0", staging_bytes=1)
    for step in range(STEPS):
        net(batch_of(step)).square().sum().backward()
        updates.step()
    updates.close()
    plainly(plain, make, None)
    assert_same(net, plain)


def test_only_parameters_of_less_than_full_precision_have_masters() -> None:
    copies = CopyStreams(torch.device("cpu"))
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    bucket = UpdateBucket([nn.Parameter(torch.ones(3, dtype=each)) for each in dtypes])
    residencies = residencies_of(bucket, copies)
    assert [each.weight.dtype for each in residencies] == [torch.float32, torch.float32, torch.float64, torch.float32]
    assert [each.weight is each.parameter for each in residencies] == [True, False, True, False]
    copies.close()


def test_gradients_in_another_order_than_the_last_find_their_state(machine: Machine) -> None:
    net = Net(4)
    plain = copy.deepcopy(net)
    updates = HostUpdates(net, list(net.blocks), momentum, machine, "cpu:0")
    optimizer = momentum(plain.parameters())
    for step, order in enumerate([(0, 1, 2, 3), (3, 1), (2, 0, 3), (1, 3, 2, 0)]):
        optimizer.zero_grad()
        for one in (net, plain):
            x = one.first(batch_of(step))
            for number in order:
                x = one.blocks[number](x)
            one.last(x).square().sum().backward()
        updates.step()
        optimizer.step()
    updates.close()
    assert_same(net, plain)


def test_an_error_in_an_update_is_said(machine: Machine) -> None:
    class FailingSGD(SGD):
        def step(self, _: object = None) -> None:  # type: ignore[override]
            if any(each.grad is not None and each.grad.abs().sum() > 0 for each in self.param_groups[0]["params"]):
                raise ValueError("no such luck")

    net = Net(2)
    updates = HostUpdates(net, list(net.blocks), FailingSGD, machine, "cpu:0")
    loss = net(batch_of(0)).square().sum()
    with suppress(ShardwiseError):  # Where it is said first is a matter of who is faster.
        loss.backward()
        updates.step()
    with pytest.raises(ShardwiseError, match="no such luck"):
        updates.wait()
    with pytest.raises(ShardwiseError, match="no such luck"):
        updates.close()
