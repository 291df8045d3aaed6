"""What forwards save, on the host until the backward: the same gradients bit for bit, in memory that is used again."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ShardwiseError
from shardwise.execution.backward import input_gradients
from shardwise.planner.plan import Plan
from shardwise.stages.activation_bytes import Kept
from shardwise.states.tiers import activation_offload
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from tests.states.tiers.late import LateCopyStreams

WIDTH, ROWS = 16, 32


class Attention(nn.Module):
    """Views of one tensor, saved by several; a transposed one; and a part that is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        mixed = torch.nn.functional.dropout(scores @ value, 0.1)
        made: Tensor = checkpoint(self.out, mixed, use_reentrant=False)
        return x + made.relu_()


@pytest.fixture(params=["copies by threads", "late copies"])
def copies(request: pytest.FixtureRequest) -> Iterator[CopyStreams]:
    found = LateCopyStreams(seed=0) if request.param == "late copies" else CopyStreams(torch.device("cpu"))
    yield found
    found.close()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(3)))


def make_offload(copies: CopyStreams, part: float) -> ActivationOffload:
    return ActivationOffload(Plan.parse(f"offload.activations={part}"), copies)


def run(
    net: nn.Module, offload: ActivationOffload | None, step: int, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and, one behind the other, of the weights."""
    torch.manual_seed(step)
    x = torch.randn(ROWS, WIDTH, requires_grad=True, dtype=next(net.parameters()).dtype)
    if offload is None:
        y = net(x)
    else:
        with offload.saving([x, *net.parameters()], kept):
            y = net(x)
    net.zero_grad()
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad, torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None])


@pytest.mark.parametrize("window", [0, 2**28], ids=["one at a time", "many at a time"])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.1])
def test_gradients_are_those_of_tensors_that_stay(
    part: float, window: int, copies: CopyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "DEFERRED_FREE_BYTES", window)
    net = make_net()
    plain, offload = copy.deepcopy(net), make_offload(copies, part)
    for step in range(3):
        for mine, theirs in zip(run(net, offload, step), run(plain, None, step), strict=True):
            assert torch.equal(mine, theirs)
    assert offload.sent_bytes > 0


class Recurrent(nn.Module):
    """An LSTM on a CPU: gates are parts of one memory, each written to in turn, and each counts its own writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.lstm(x.view(4, -1, WIDTH))[0]
        return made.view_as(x)


def test_parts_of_one_memory_that_are_written_one_after_the_other_are_kept_apart(copies: CopyStreams) -> None:
    torch.manual_seed(0)
    net = Recurrent().double()
    for mine, theirs in zip(*(run(net, each, 0) for each in (make_offload(copies, 1.0), None)), strict=True):
        assert torch.equal(mine, theirs)


def test_the_part_on_the_host_is_the_one_that_was_asked_for_and_its_memory_is_used_again(copies: CopyStreams) -> None:
    net = make_net()
    every, half = make_offload(copies, 1.0), make_offload(copies, 0.5)
    counted = [Kept([]), Kept([])]
    for offload, kept in zip((every, half), counted, strict=True):
        run(net, offload, 0, kept)
        taken, sent = offload.num_bytes, offload.sent_bytes
        for step in range(1, 4):
            run(net, offload, step)
        assert offload.num_bytes == taken
        assert offload.sent_bytes == 4 * sent
    assert half.sent_bytes == pytest.approx(every.sent_bytes / 2, rel=0.2)
    assert counted[1].num_bytes > counted[0].num_bytes


def test_both_halves_of_a_backward_find_what_they_need(copies: CopyStreams) -> None:
    net = make_net()
    plain, offload = copy.deepcopy(net), make_offload(copies, 1.0)
    run(plain, None, 0)
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True, dtype=next(net.parameters()).dtype)
    with offload.saving([x, *net.parameters()], None):
        loss = net(x).square().sum()
    weights = input_gradients([loss], [None], [x])
    held = offload.held_bytes
    offload.put_away()
    assert offload.held_bytes == 0 < held
    weights.run()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_a_graph_that_is_never_run_back_gives_its_memory_back(copies: CopyStreams) -> None:
    net, offload = make_net(), make_offload(copies, 1.0)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, requires_grad=True, dtype=next(net.parameters()).dtype)
        with offload.saving([x, *net.parameters()], None):
            y = net(x)
        del y
    assert offload.sent_bytes == 3 * offload.num_bytes


def test_a_host_that_is_full_is_said_before_it_is(copies: CopyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    free: Callable[[], int] = lambda: 2000  # noqa: E731
    monkeypatch.setattr(activation_offload, "available_bytes", free)
    net, offload = make_net(), make_offload(copies, 1.0)
    with pytest.raises(ShardwiseError, match=r"offload.activations=1 of 1 rank .* needs .* has .* available"):
        run(net, offload, 0)
