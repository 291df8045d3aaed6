"""Activations that go to the host and come back: the same numbers bit for bit, and no more of a device than is said."""

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.placing import Placed
from shardwise.placing import activation_offload as placed_offload
from shardwise.placing.layout import bytes_with, find_part, lay_out, offloaded_bytes, window_bytes
from shardwise.placing.loads import Load, find_loads, total_bytes
from shardwise.placing.offload_planner import OffloadQuestion, decide
from shardwise.placing.places import Place, PlaceOptions
from shardwise.states.tiers import activation_offload
from shardwise.states.tiers.copy_streams import CopyStreams
from tests.engine.same import assert_same
from tests.stages.families import make_batch, make_family
from tests.stages.nets import UNet
from tests.stages.pieces import Net
from tests.stages.small import small_matrices
from tests.states.tiers.late import LateCopyStreams

HERE, TWO, BESIDE = ["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu"]
ROWS = 64


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def ids(seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))


def sent(placed: Placed) -> int:
    assert placed.activations is not None
    return placed.activations.sent_bytes


class Block(nn.Module):
    """Views of one tensor, dropout, a change in place, and a part that may be checkpointed."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.again = nn.Linear(16, 48), nn.Linear(16, 16), again

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        mixed = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        made = dropout(self.out(mixed), 0.1, self.training)
        again = checkpoint(self.out, made, use_reentrant=False) if self.again else self.out(made)
        out: Tensor = hidden + again.relu_()
        return out


class Knotty(nn.Module):
    """Such blocks, and a head that is tied to the table."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(again) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = hidden @ self.table.weight.T
        return out


@pytest.mark.parametrize("part", [pytest.param(1.0, marks=pytest.mark.whole), 0.4])
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 4}, {"microbatches": 4, "schedule": "zb-h1"}, {"microbatches": 4, "schedule": "interleaved"}],
    ids=["by layers", "1f1b", "zb-h1", "interleaved"],
)
def test_a_placement_trains_as_it_does_without_a_host(options: dict[str, Any], part: float) -> None:
    nets = [sw.place(Knotty(), TWO, **options), sw.place(Knotty(), TWO, activations_on_host=part, **options)]
    for net in nets:
        optimizer = AdamW(net.parameters(), lr=0.01)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(ids(step)).square().mean().backward()
            optimizer.step()
    assert_same(*nets)
    assert sent(nets[1]) > 0
    offloaded = nets[1].activations
    assert offloaded is not None
    assert offloaded.sent_bytes <= offloaded.returned_bytes
    assert set(offloaded.parts.values()) == {part}
    # Memory of the host is used again: none of it is in a circle that nobody can leave.
    assert 3 * offloaded.host_bytes == offloaded.sent_bytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"microbatches": 4, "schedule": "zb-h1"}], ids=["by layers", "zb-h1"])
def test_copies_that_come_as_late_as_they_may_are_waited_for(
    options: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what is not told to wait for a copy reads or overwrites rubbish."""
    plain = sw.place(Knotty(), TWO, **options)
    monkeypatch.setattr(placed_offload, "CopyStreams", lambda _: LateCopyStreams(seed))
    late = sw.place(Knotty(), TWO, activations_on_host=0.7, **options)
    for net in (plain, late):
        for step in range(2):
            torch.manual_seed(step)
            net(ids(step)).square().mean().backward()
    assert_same(plain, late)


@pytest.mark.parametrize("devices", [HERE, TWO])
def test_recomputed_parts_draw_and_compute_the_same(devices: list[str]) -> None:
    nets = [sw.place(Knotty(again=True), devices, activations_on_host=part) for part in (0, 1)]
    for net in nets:
        torch.manual_seed(0)
        net(ids()).square().mean().backward()
    assert_same(*nets)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_model_of_hugging_face_trains_and_generates(microbatches: int) -> None:
    module: Any = make_family("llama").train()
    batch = make_batch("llama", num_sequences=4)
    nets: list[Any] = [
        sw.place(copy.deepcopy(module), TWO, microbatches=microbatches, activations_on_host=part) for part in (0, 1)
    ]
    for net in nets:
        net(**batch, labels=batch["input_ids"]).loss.backward()
    assert_same(*nets)
    before = sent(nets[1])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    texts = [net.eval().generate(**batch, **settings) for net in nets]
    assert torch.equal(*texts)
    with torch.no_grad():
        nets[1](**batch)
    assert sent(nets[1]) == before > 0
    assert nets[0].activations is None


def test_skips_and_batch_norm() -> None:
    image, moment = torch.randn(4, 3, 16, 16), torch.rand(4)
    module = UNet().train()
    nets = [sw.place(copy.deepcopy(module), TWO, microbatches=2, activations_on_host=part) for part in (0, 1)]
    for net in nets:
        net(image, moment)["noise"].square().mean().backward()
    assert_same(*nets)
    assert sent(nets[1]) > 0


def test_gradients_of_inputs_two_forwards_at_once_and_a_backward_that_keeps_its_graph() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    nets = [sw.place(copy.deepcopy(module), HERE, activations_on_host=part) for part in (0, 1)]
    found = []
    for net in nets:
        x = torch.linspace(-1, 1, 32 * 32).view(32, 32).requires_grad_()
        first, second = net(x).sum(), net(2 * x).square().sum()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        assert x.grad is not None
        [again] = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(again.square().sum(), x)[0] + x.grad)
    assert torch.equal(*found)
    assert_same(*nets)
    assert sent(nets[1]) > 0


def test_a_loss_may_outlive_the_module_and_leaves_no_thread() -> None:
    gc.collect()
    before = set(threading.enumerate())
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    plain, x = copy.deepcopy(module), torch.randn(32, 32)
    loss = sw.place(module, HERE, activations_on_host=1)(x).sum()
    gc.collect()
    loss.backward()
    plain(x).sum().backward()
    assert_same(plain, module)
    del loss
    gc.collect()
    assert set(threading.enumerate()) <= before


class Spoilt(nn.Module):
    """Changes what it has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.one(x).exp()
        out: Tensor = self.two(made)
        made.add_(1)
        return out


def test_what_is_changed_after_it_was_saved_is_told_as_torch_tells_it() -> None:
    x = torch.randn(16, 32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Spoilt()(x).sum().backward()
    with pytest.raises(ShardwiseError, match=r"was changed in place after it was saved, by 1 operation\n"):
        sw.place(Spoilt(), HERE, activations_on_host=1)(x).sum().backward()
    net = sw.place(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), HERE, activations_on_host=1)
    loss = net(x).sum()
    with torch.no_grad():
        for each in net.parameters():
            each.mul_(2)
    with pytest.raises(ShardwiseError, match="was changed in place after it was saved"):
        loss.backward()


@pytest.mark.parametrize("copies", [CopyStreams, lambda _: LateCopyStreams(0)], ids=["on time", "late"])
def test_no_more_is_brought_back_than_the_window_holds(
    monkeypatch: pytest.MonkeyPatch, copies: Callable[[torch.device], CopyStreams]
) -> None:
    """Also not where a backward begins before all that its forward saved has left."""
    monkeypatch.setattr(placed_offload, "CopyStreams", copies)
    size = 64 * 32 * 4
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(20)))
    net = sw.place(module, HERE, activations_on_host=1, budget={"cpu:0": 12 * 3 * size}, moments=0)
    assert net.activations is not None
    loss = net(torch.randn(64, 32)).sum()
    assert (
        net.activations.host_bytes == 20 * size
    )  # Of each layer what the next one is given: the first is given the batch.
    held: list[int] = []
    unpack = activation_offload.ActivationOffload._bring

    def bring(self: Any, away: Any) -> None:
        unpack(self, away)
        held.append(self.held_bytes + self._leaving.num_bytes)

    monkeypatch.setattr(activation_offload.ActivationOffload, "_bring", bring)
    loss.backward()
    assert 3 * size < max(held) <= (3 + 2) * size


# --------------------------------------------------------------------------------------------------------------------


def a_place(name: str, room: int, speed: float = 1.0) -> Place:
    return Place(name=name, device=torch.device("cpu"), room_bytes=room, speed=speed)


def a_load(number: int, kept: int = 100, small: int = 0, given: int = 0) -> Load:
    return Load(
        unit=str(number), cost=1.0, states={str(number): 10}, kept_bytes=kept, small_bytes=small, given_bytes=given
    )


def test_what_a_place_needs_is_counted_by_hand() -> None:
    loads = [a_load(number, small=10, given=20) for number in range(4)]
    assert offloaded_bytes(0.5, loads, 1) == 0.5 * (400 - 40)
    assert offloaded_bytes(1.0, loads, 2) == 2 * (400 - 40 - 20)  # In stages what the first is given stays.
    # Weights, what is too small, a window of 50, and one unit at work.
    assert bytes_with(1.0, loads, 1, window=50) == 40 + 40 + 50 + 100
    assert bytes_with(0.0, loads, 1, window=50) == total_bytes(loads, 1) == 440
    # Where less would leave than may be on its way, nothing is won.
    assert bytes_with(0.2, loads, 1, window=50) == 440


def test_the_least_part_that_makes_room_is_sent() -> None:
    loads = [a_load(number) for number in range(10)]
    for room in (500, 700, 900, 1099, 1100):
        place = a_place("cpu:0", room)
        part = find_part(None, loads, 1, place)
        assert part is not None
        window = window_bytes(place)
        assert bytes_with(part, loads, 1, window) <= room
        assert part == 0 or bytes_with(part - 0.01, loads, 1, window) > room
    assert find_part(None, loads, 1, a_place("cpu:0", 200)) is None
    assert find_part(0.5, loads, 1, a_place("cpu:0", 2000)) == 0.5


def test_units_are_laid_out_by_what_stays_of_them() -> None:
    loads = [a_load(number) for number in range(8)]
    places = [a_place("a", 500, speed=3.0), a_place("b", 500)]
    with pytest.raises(ShardwiseError, match=r"no room: the module needs 880 B \(800 B of it activations of 1 microb"):
        lay_out(loads, [replace(each, room_bytes=400) for each in places], [0, 1], num_in_flight=1)
    stages = lay_out(loads, places, [0, 1], num_in_flight=1, part=None)
    assert [len(stage) for stage in stages] == [6, 2]  # As fast as they are: with all activations there, [4, 4].
    tight = [replace(each, room_bytes=150) for each in places]
    with pytest.raises(ShardwiseError, match=r"of 1 microbatches, of which 800 B may be on the host; the largest"):
        lay_out(loads, tight, [0, 1], num_in_flight=1, part=None)


def needs(net: nn.Module, example: dict[str, Tensor]) -> int:
    return total_bytes(find_loads(net, example, moments=2).calls, 1)


@pytest.mark.parametrize(("room", "streams"), [(0.8, False), (0.4, False), (0.16, True)])
def test_what_has_no_room_is_found_out(room: float, streams: bool) -> None:
    """Activations alone, or, in the least room, weights too."""
    net, example = Net(num_blocks=12, width=24), {"ids": ids()}
    plain = copy.deepcopy(net)
    budget = {"cpu:0": int(room * needs(net, example))}
    placed = sw.place(net, BESIDE, example=example, budget=budget, host="stream")
    assert placed.activations is not None
    assert (placed._arranged.host is not None) == streams
    assert f"{100 * placed.activations.parts['cpu:0']:.0f} % of the activations on the host" in placed.reason
    for each in (plain, placed):
        each(ids()).square().mean().backward()
    assert_same(plain, placed)
    kept = sum(load.kept_bytes for load in find_loads(net, example, moments=2).calls)
    assert sent(placed) == pytest.approx(placed.activations.parts["cpu:0"] * kept, rel=0.15)


def test_a_pipeline_sends_what_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside GPUs: two places compute, the third is the host."""
    from shardwise.placing import arrange as arrange_module

    monkeypatch.setattr(arrange_module, "divide", lambda places, _: (tuple(places[:2]), tuple(places[2:])))
    example = {"ids": ids()}
    budget = {name: int(0.3 * needs(Net(num_blocks=12, width=24), example)) for name in TWO}
    plain = sw.place(Net(num_blocks=12, width=24), TWO, microbatches=4, example=example)
    speeds = {"cpu:0": 1.0, "cpu:1": 1.0, "cpu": 1e-6}
    options: dict[str, Any] = {"microbatches": 4, "example": example, "budget": budget, "speeds": speeds}
    placed = sw.place(Net(num_blocks=12, width=24), [*TWO, "cpu"], **options)
    assert placed._arranged.pipeline is not None
    assert placed.activations is not None
    assert set(placed.activations.parts) == set(TWO)
    for net in (plain, placed):
        net(ids()).square().mean().backward()
    assert_same(plain, placed)


@pytest.mark.parametrize(("device", "expected"), [(1e-3, True), (1e12, False)])
def test_the_cheaper_of_weights_and_activations_leaves(
    device: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow device activations cost nothing, and streamed weights the host's update. On a fast one links decide."""
    from shardwise.placing import offload_planner

    net, example = Net(num_blocks=12, width=24), {"ids": ids(rows=16)}
    loads = find_loads(net, example, moments=2)
    monkeypatch.setattr(offload_planner, "matmul_flops", lambda *_: device)
    monkeypatch.setattr(offload_planner, "copied_bytes_per_second", lambda: 1e9 if expected else 1e30)
    question = OffloadQuestion(
        module=net,
        loads=loads,
        devices=[a_place("cpu:0", int(0.95 * total_bytes(loads.calls, 1)))],
        memory=[a_place("cpu", 2**30)],
        options=PlaceOptions(host="stream"),
    )
    ways, reason = decide(question)
    assert len(ways) >= 2
    assert bool(ways[0].parts) == expected
    assert [way.seconds for way in ways] == sorted(way.seconds for way in ways)
    assert reason.count(" a step ") == len(ways)


def test_checkpointing_is_told_where_it_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.placing import offload_planner

    monkeypatch.setattr(offload_planner, "matmul_flops", lambda *_: 1e15)  # Then the link decides.
    net, example = Net(num_blocks=12, width=24), {"ids": ids()}
    placed = sw.place(net, BESIDE, example=example, budget={"cpu:0": int(0.6 * needs(net, example))}, host="stream")
    assert "; gradient checkpointing would take" in placed.reason


def test_a_host_that_is_full_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net, example = Net(num_blocks=12, width=24), {"ids": ids()}
    budget = {"cpu:0": int(0.5 * needs(net, example)), "cpu": 200_000}
    with pytest.raises(
        ShardwiseError, match=r"no room on the host: .* of activations of cpu:0 .*only 195.3 KiB are available"
    ):
        sw.place(copy.deepcopy(net), BESIDE, example=example, budget=budget, host="stream")
    # A batch that is larger than the example.
    budget["cpu"] = 900_000
    placed = sw.place(copy.deepcopy(net), BESIDE, example=example, budget=budget, host="stream")
    placed(ids()).sum().backward()
    with pytest.raises(ShardwiseError, match=r"no room on the host for activations: it holds .* of cpu:0, .* more are"):
        placed(ids(rows=4 * ROWS))
    placed(ids()).sum().backward()  # And it can be used again.
    free = sw.place(net, HERE, activations_on_host=1)
    monkeypatch.setattr(placed_offload, "available_bytes", lambda: 20_000)
    with pytest.raises(ShardwiseError, match=r"there is room for 19.5 KiB"):
        free(ids())
    with pytest.raises(ShardwiseError, match=r"activations_on_host=1.5: it is a part of them, from 0 to 1"):
        sw.place(net, HERE, activations_on_host=1.5)
