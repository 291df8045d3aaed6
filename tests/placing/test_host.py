"""What has no room on a device is streamed from the host. Here both are the CPU's memory."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.placing import Placed
from shardwise.placing import arrange as arrange_module
from shardwise.placing.host import divide, lay_out_streams
from shardwise.placing.loads import find_loads
from shardwise.placing.offload_planner import OffloadQuestion, decide
from shardwise.placing.places import Place, PlaceOptions
from tests.stages.families import make_batch, make_family, recompute
from tests.stages.nets import UNet
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

ONE, TWO = ["cpu:0", "cpu"], ["cpu:0", "cpu:1", "cpu"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def ids(seed: int = 0, rows: int = 4) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))


def weight_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def streamed(module: nn.Module, devices: list[str], part: float, **options: Any) -> Placed:
    """The module with room for a part of what it needs on the devices together."""
    needed = weight_bytes(module) * (4 if module.training else 1)
    num_devices = len(devices) - 1
    budget = {name: int(part * needed / num_devices) for name in devices[:-1]}
    placed = sw.place(module, devices, budget=budget, host="stream", **options)
    assert any(place.name == "cpu" for place in placed.where.values()), "all of it has room"
    return placed


def assert_same(plain: nn.Module, placed: nn.Module) -> None:
    for (name, one), (other_name, other) in zip(plain.named_parameters(), placed.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_module_computes_the_same_and_its_state_is_whole(devices: list[str]) -> None:
    module = Net(num_blocks=12, width=24).eval()
    plain = copy.deepcopy(module)
    placed = streamed(module, devices, 0.8)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(placed(ids()), plain(ids()))
    assert all(torch.equal(placed.state_dict()[name], each) for name, each in plain.state_dict().items())
    other = Net(num_blocks=12, width=24)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(1.5)
    placed.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(placed(ids()), other(ids()))
    with pytest.raises(ShardwiseError, match=r"load_state_dict\(..., assign=True\) after `place`: .* are on the host"):
        placed.load_state_dict(other.state_dict(), assign=True)
    with pytest.raises(ShardwiseError, match=r"to\(...\) after `place`"):
        placed.double()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda some: SGD(some, lr=0.05, momentum=0.9),
    "adamw": lambda some: AdamW(some, lr=0.01),
    "foreach": lambda some: AdamW(some, lr=0.01, foreach=True),
    "fused": lambda some: AdamW(some, lr=0.01, fused=True),
}


@pytest.mark.parametrize("devices", [ONE, TWO])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_users_own_optimizer_trains_it_bit_for_bit(name: str, devices: list[str]) -> None:
    module = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(module)
    placed = streamed(module, devices, 0.8)
    for net in (plain, placed):
        optimizer = OPTIMIZERS[name](net.parameters())
        rates = LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):  # Gradients of two backwards are added up.
                net(ids(2 * step + part)).square().mean().backward()
            clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            rates.step()
            with torch.no_grad():
                net.eval()(ids(100 + step))
                net.train()
    assert_same(plain, placed)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_model_of_hugging_face_is_trained_with_checkpointing(devices: list[str], use_reentrant: bool) -> None:
    module: Any = make_family("llama").train()
    recompute(module, use_reentrant=use_reentrant)
    plain = copy.deepcopy(module)
    placed = streamed(module, devices, 0.75, moments=2)
    batch = make_batch("llama", num_sequences=2)
    for net in (plain, placed):
        optimizer = AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            loss = net(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net(**batch, labels=batch["input_ids"]).loss.backward()
    assert_same(plain, placed)
    plain.eval()
    placed.eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(placed.generate(**batch, **settings), plain.generate(**batch, **settings))


def test_skips_meet_and_microbatches_are_one_batch() -> None:
    module = UNet().train()
    plain = copy.deepcopy(module)
    image, moment = torch.randn(4, 3, 16, 16), torch.rand(4)
    placed = streamed(module, ONE, 0.8, microbatches=2)
    for net in (plain, placed):
        net(image, moment)["noise"].square().mean().backward()
    assert_same(plain, placed)


class Recurrent(nn.Module):
    """Layers that keep lists of their weights, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(6))
        self.again = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.again(layer(x)[0])
        return x


def test_layers_that_keep_lists_of_their_weights_and_one_that_is_called_again_and_again() -> None:
    module = Recurrent()
    plain, x = copy.deepcopy(module), torch.randn(2, 3, 8)
    placed = streamed(module, ONE, 0.9)
    for net in (plain, placed):
        net(x).square().mean().backward()
    assert_same(plain, placed)


def test_what_is_frozen_later_has_no_gradient_any_more() -> None:
    module = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(module)
    placed = streamed(module, ONE, 0.8)
    for net in (plain, placed):
        for number, each in enumerate(net.parameters()):
            each.requires_grad_(number % 3 > 0)
        net(ids()).square().mean().backward()
    assert_same(plain, placed)


def test_a_weight_that_is_changed_between_a_forward_and_its_backward_is_told() -> None:
    module = Net(num_blocks=12, width=24)
    placed = streamed(module, ONE, 0.8)
    loss = placed(ids()).sum()
    with torch.no_grad():
        for each in placed.parameters():
            each.add_(1.0)
    with pytest.raises((ShardwiseError, RuntimeError), match=r"were changed between|modified by an inplace"):
        loss.backward()
    # And it can be used again.
    placed.zero_grad()
    placed(ids()).sum().backward()


def test_weights_that_are_given_other_memory_are_used() -> None:
    module = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(module)
    placed = streamed(module, ONE, 0.8)
    for net in (plain, placed):
        for each in net.parameters():
            each.data = each.data * 2
    assert torch.equal(placed(ids()), plain(ids()))


def test_what_is_not_trained_may_stay_on_disk(tmp_path: Path) -> None:
    module = Net(num_blocks=12, width=24).eval()
    plain = copy.deepcopy(module)
    budget = {"cpu:0": int(0.8 * weight_bytes(module)), "cpu": 300}
    with pytest.raises(ShardwiseError, match=r"no room on the host: .* there are 300 B\n.*or folder="):
        sw.place(copy.deepcopy(module), ONE, budget=budget, host="stream")
    placed = sw.place(module, ONE, budget=budget, host="stream", folder=tmp_path)
    assert list(tmp_path.iterdir())
    with torch.no_grad():
        assert torch.equal(placed(ids()), plain(ids()))
        assert all(torch.equal(placed.state_dict()[name], each) for name, each in plain.state_dict().items())
        for each in placed.parameters():
            each.mul_(2)
        with pytest.raises(ShardwiseError, match="weights of a block that stays on disk were changed"):
            placed(ids())


def place_of(name: str, kind: str, speed: float = 1.0) -> Place:
    return Place(name=name, device=torch.device(kind), room_bytes=2**20, speed=speed)


def test_the_host_is_the_cpu_beside_gpus_or_what_is_called_so() -> None:
    gpu, host = place_of("cuda:0", "cuda:0"), place_of("cpu", "cpu")
    first, second = place_of("cpu:0", "cpu"), place_of("cpu:1", "cpu")
    assert divide((gpu, host), "auto") == divide((gpu, host), "stream") == ((gpu,), (host,))
    assert divide((host, gpu, first), "auto") == ((gpu,), (host, first))
    assert divide((gpu, host), "compute") == ((gpu, host), ())
    assert divide((first, second), "auto") == ((first, second), ())
    assert divide((first, host), "auto") == ((first, host), ())
    assert divide((first, host), "stream") == ((first,), (host,))
    for places in ((first, second), (host,)):
        with pytest.raises(ShardwiseError, match='host="stream" needs a device that computes'):
            divide(places, "stream")


def test_mistakes_are_sentences() -> None:
    module = Net(num_blocks=12, width=24)
    with pytest.raises(ShardwiseError, match="straem"):
        sw.place(module, ONE, host="straem")  # type: ignore[arg-type]
    with pytest.raises(ShardwiseError, match=r"no room at cpu:0: with all of its 13 units on the host, 0 B of activa"):
        sw.place(module, ONE, budget={"cpu:0": 2000}, host="stream")
    with pytest.raises(ShardwiseError, match=r"no room on the host: .* would go there, but only 5.0 KiB are available"):
        sw.place(module, ONE, budget={"cpu:0": 63_000, "cpu": 5 * 1024}, host="stream", moments=0)
    with pytest.raises(ShardwiseError, match=r"no room: the module needs .* of it activations .* cpu:0 has room for"):
        sw.place(module, ONE, budget={"cpu:0": 12_000}, host="stream", example={"ids": ids(rows=64)})


@pytest.mark.parametrize(("speed", "streams"), [(1e-6, True), (1e6, False)])
def test_the_host_computes_what_has_no_room_only_where_that_is_faster(speed: float, streams: bool) -> None:
    module = Net(num_blocks=12, width=24)
    example = {"ids": ids()}
    loads = find_loads(module, example, moments=2)
    room = sum(load.kept_bytes for load in loads.calls) + 4 * weight_bytes(module)
    device = replace(place_of("cpu:0", "cpu"), room_bytes=int(0.9 * room))
    host = replace(place_of("cpu", "cpu", speed), room_bytes=2**30)
    question = OffloadQuestion(
        module=module,
        loads=loads,
        devices=[device],
        memory=[host],
        options=PlaceOptions(activations_on_host=0.0),
    )
    ways, reason = decide(question)
    assert [way.host_computes for way in ways] == [not streams, streams]
    [way] = [way for way in ways if not way.host_computes]
    assert 0 < sum(unit.is_streamed for unit in way.units) < len(way.units)
    assert "a step if streamed" in reason
    smaller = replace(device, room_bytes=int(0.8 * 4 * weight_bytes(module)))
    unmeasured, reason = decide(replace(question, loads=find_loads(module, None, moments=2), devices=[smaller]))
    assert unmeasured[0].units
    assert reason == "if streamed: no example= says how long the host would compute"


@pytest.mark.parametrize(("speed", "room", "streams"), [(1e-6, 0.9, True), (1e6, 0.9, False), (1e-6, 0.3, False)])
def test_auto_takes_the_faster_way_and_that_for_which_there_is_room(
    speed: float, room: float, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a GPU: the first place computes, the second is the host."""
    monkeypatch.setattr(arrange_module, "divide", lambda places, _: (tuple(places[:1]), tuple(places[1:])))
    net = Net(num_blocks=12, width=24)
    plain = copy.deepcopy(net)
    example = {"ids": ids()}
    kept = sum(load.kept_bytes for load in find_loads(net, example, moments=2).calls)
    budget = {"cpu:0": int(room * (kept + 4 * weight_bytes(net)))}
    speeds = {"cpu:0": 1.0, "cpu": speed}
    placed = sw.place(net, ONE, example=example, budget=budget, speeds=speeds, activations_on_host=0)
    assert (placed._arranged.host is not None) == streams
    assert ("nothing else has room: no room" in placed.reason) == (room < 0.5)
    assert {place.name for place in placed.where.values()} == {"cpu:0", "cpu"}
    for each in (plain, placed):
        each(ids()).square().mean().backward()
    assert_same(plain, placed)


def test_units_that_share_a_weight_are_computed_where_it_is() -> None:
    module = make_family("llama").eval()
    first, second, host = (place_of(name, "cpu") for name in TWO)
    units = lay_out_streams(module, find_loads(module, None, moments=2), [first, second], [host], moments=2)
    by_name = {unit.name: unit for unit in units}
    assert by_name["lm_head"].place is by_name["model.embed_tokens"].place is first
    assert by_name["model.layers.3"].place is second
    # The table is one weight, and counts once.
    table = module.get_parameter("model.embed_tokens.weight")
    assert sum(unit.fixed_bytes for unit in units) == table.numel() * table.element_size()
