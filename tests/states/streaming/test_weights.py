"""Weights that live on the host: the same numbers as without, the bytes that move, and the room that it takes."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.states.tiers import StreamedWeights, stream
from shardwise.states.tiers.choose_offloaded import spread
from shardwise.states.tiers.streamed_weights import own_parameters, shared_parameters
from shardwise.states.tiers.swapped_storage import Presence
from tests.stages.families import make_batch, make_family

WIDTH = 16


class Block(nn.Module):
    """Saves a transposed weight for its backward, as a matmul does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(x @ self.up.weight.t() + self.up.bias))
        return out


class Net(nn.Module):
    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


@pytest.fixture
def machine() -> Iterator[Machine]:
    torch.manual_seed(0)
    with Machine(["cpu:0"]) as found:
        yield found


def streamed(machine: Machine, net: Net, room_bytes: int | None = None) -> StreamedWeights:
    weights = stream(net, machine, "cpu:0", blocks=list(net.blocks), room_bytes=room_bytes)
    assert weights is not None
    return weights


def assert_trains_as(net: Net, plain: Net) -> None:
    """Forwards and gradients are those of the plain module, bit for bit."""
    x = torch.randn(5, 4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(net(x), plain(x))
    for _ in range(2):
        net(x).square().sum().backward()
        plain(x).square().sum().backward()
    for (name, ours), (_, theirs) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("room", [None, 30_000])
def test_forwards_and_gradients_are_those_of_the_plain_module(machine: Machine, room: int | None) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    weights = streamed(machine, net, room)
    assert_trains_as(net, plain)
    weights.close()
    x = torch.randn(5, 4)
    assert torch.equal(net(x), plain(x))


def test_a_pass_moves_each_block_once_and_holds_few(machine: Machine) -> None:
    net = Net()
    weights = streamed(machine, net)
    block_bytes = weights.host_bytes // 8
    with torch.no_grad():
        net(torch.randn(5, 4))
        before = sum(machine.mover.moved_bytes.values())
        net(torch.randn(5, 4))
    assert sum(machine.mover.moved_bytes.values()) - before == 8 * block_bytes
    assert weights.device_bytes == 3 * block_bytes
    here = [each for each in weights._storages if each.state is not Presence.AWAY]
    assert len(here) == 3


def test_a_hugging_face_model_is_streamed_unmodified(machine: Machine) -> None:
    model: Any = make_family("llama").eval()
    batch = make_batch("llama")
    given = {name: each for name, each in batch.items() if name == "input_ids"}
    with torch.no_grad():
        expected = model(**given).logits
        weights = stream(model, machine, "cpu:0", blocks=list(model.model.layers))
        assert weights is not None
        assert torch.equal(model(**given).logits, expected)
        tokens = model.generate(given["input_ids"][:1, :4], max_new_tokens=3, do_sample=False)
        weights.close()
        assert torch.equal(model.generate(given["input_ids"][:1, :4], max_new_tokens=3, do_sample=False), tokens)


def test_new_weights_on_the_host_are_used_after_a_refresh(machine: Machine) -> None:
    net = Net()
    weights = streamed(machine, net)
    x = torch.randn(2, 4)
    with torch.no_grad():
        net(x)
        for each in weights.weights().values():
            each.zero_()
        weights.refresh()
        assert torch.equal(net(x), net.last(net.first(x)))


def test_what_fits_is_not_streamed_and_what_does_not_is_spread(machine: Machine) -> None:
    net = Net()
    assert stream(net, machine, "cpu:0", blocks=list(net.blocks), room_bytes=10**9) is None
    assert spread(8, 4) == [1, 3, 5, 7]
    assert spread(8, 8) == list(range(8))
    assert len(spread(7, 3)) == 3


def test_shared_parameters_stay(machine: Machine) -> None:
    net = Net(4)
    net.blocks[2].up = net.blocks[0].up
    stays = shared_parameters(net, list(net.blocks))
    assert [len(own) for own in own_parameters(list(net.blocks), stays)] == [2, 4, 2, 4]
    plain = copy.deepcopy(net)
    streamed(machine, net)
    x = torch.randn(3, 4)
    assert torch.equal(net(x), plain(x))


def test_too_little_room_is_a_sentence(machine: Machine) -> None:
    net = Net()
    with pytest.raises(ShardwiseError, match=r"no room at cpu:0: .* for the 3 that are being copied"):
        stream(net, machine, "cpu:0", blocks=list(net.blocks), room_bytes=5_000)


class Tied(Net):
    """Its last block reads the embedding's table, which is outside of all blocks, and so does the end."""

    def __init__(self) -> None:
        super().__init__(6)
        self.table = nn.Embedding(2 * WIDTH, WIDTH)
        last = self.blocks[5]
        assert isinstance(last, Block)
        last.up.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        out: Tensor = y + (self.table.weight @ torch.ones(WIDTH)).sum() + self.table(torch.tensor([1, 3])).sum()
        return out


@pytest.mark.parametrize("room", [None, 20_000])
def test_a_weight_that_is_used_outside_of_the_blocks_too_stays(machine: Machine, room: int | None) -> None:
    net = Tied()
    plain = copy.deepcopy(net)
    weights = streamed(machine, net, room)
    assert id(net.table.weight) not in {id(each) for each in weights.weights()}
    for step in range(2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        ours, theirs = net(x), plain(x)
        assert torch.equal(ours, theirs)
        for each in (ours, theirs):
            each.square().sum().backward()
    for (name, one), (_, other) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
    weights.close()


def test_a_weight_that_a_block_on_the_device_shares_with_one_on_the_host_stays(machine: Machine) -> None:
    net = Net(6)
    first, second = net.blocks[0], net.blocks[1]
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    first.up.weight = second.up.weight
    plain = copy.deepcopy(net)
    weights = streamed(machine, net, 22_000)
    away = {id(each) for each in weights.weights()}  # To look at one that is away would be to read no memory.
    assert 0 < len(away) < len(list(net.blocks.parameters())) - 1
    assert id(first.up.weight) not in away
    assert id(second.up.bias) in away
    x = torch.randn(5, 4)
    assert torch.equal(net(x), plain(x))
    weights.close()


class Recomputed(Net):
    """Keeps nothing of its blocks for the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("make", [Net, lambda: Recomputed(use_reentrant=False), lambda: Recomputed(use_reentrant=True)])
def test_a_step_brings_each_block_twice_but_for_the_last_and_takes_each_gradient_once(
    machine: Machine, make: Callable[[], Net]
) -> None:
    """Blocks of the end of the forward are still there for the beginning of the backward."""
    net = make()
    plain = copy.deepcopy(net)
    weights = StreamedWeights(list(net.blocks), machine, "cpu:0", wraps=False)
    block_bytes = weights.host_bytes // 8
    gradient_bytes = sum(each.numel() * each.element_size() for each in net.blocks.parameters())
    for _ in range(2):
        before = sum(machine.mover.moved_bytes.values())
        x = torch.randn(5, 4)
        for each in (net, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        assert sum(machine.mover.moved_bytes.values()) - before == (8 + 8 - 3) * block_bytes + gradient_bytes
        assert all(each.state is Presence.AWAY for each in weights._storages)
        with torch.no_grad():
            for each in (net, plain):
                for parameter in each.parameters():
                    assert parameter.grad is not None
                    parameter.data.sub_(0.01 * parameter.grad)  # As optimizers do that torch does not see.
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), plain.parameters(), strict=True))
    weights.close()


def test_after_a_backward_that_failed_the_next_one_is_right(machine: Machine) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    weights = streamed(machine, net)

    def fail(_: Tensor) -> None:
        raise ValueError("no gradient here")

    def spoil(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    hook = net.blocks[3].register_forward_hook(spoil)
    with pytest.raises(ValueError, match="no gradient here"):
        net(torch.randn(5, 4)).sum().backward()
    hook.remove()
    net.zero_grad()
    x = torch.randn(5, 4)
    for each in (net, plain):
        each(x).sum().backward()
    for (name, one), (_, other) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    weights.close()
