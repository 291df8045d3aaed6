"""A placed module is the module: losses, gradients and weights, layer by layer and in microbatches."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from shardwise.placing import place
from tests.stages.families import make_batch, make_family
from tests.stages.nets import ResNet50, UNet
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

PLACES = ["cpu:0", "cpu:1"]
#: Every schedule that holds each weight once, and updates none in the middle.
SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
             "dualpipe-v", "hanayo", "auto"]  # fmt: skip

Model = tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def family(name: str) -> Model:
    batch = {**make_batch(name, num_sequences=8), "use_cache": False}
    return make_family(name), batch, lambda output: output.logits


def resnet() -> Model:
    torch.manual_seed(0)
    # In float64: with batch norm over so few rows, what float32 rounds is seen in a few steps.
    image = torch.randn(16, 3, 64, 64, dtype=torch.float64)
    return ResNet50(width=4, num_classes=7).double().train(), {"image": image}, lambda output: output


def unet() -> Model:
    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 3, 16, 16), "moment": torch.rand(8)}
    return UNet().train(), batch, lambda output: output["noise"]


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": lambda: family("gpt2"),
    "t5": lambda: family("t5"),
    "resnet-50": resnet,
    "u-net": unet,
}


def loss_of(output: Tensor) -> Tensor:
    """A mean over rows, so that the mean over microbatches is that over the batch."""
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).reshape(output[0].shape)
    return (output * weights).flatten(1).sum(1).mean() + output.square().mean()


def pieces(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    cut = {name: each.chunk(count) if isinstance(each, Tensor) else [each] * count for name, each in batch.items()}
    return [{name: each[number] for name, each in cut.items()} for number in range(count)]


def train_plainly(module: nn.Module, batch: dict[str, Any], pick: Callable[[Any], Tensor], count: int) -> list[float]:
    """Three steps on one device; in microbatches, since batch norm sees those."""
    optimizer, losses = SGD(module.parameters(), lr=0.001), []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = [pick(module(**each)) for each in pieces(batch, count)]
        loss = loss_of(torch.cat(outputs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_placed(module: nn.Module, batch: dict[str, Any], pick: Callable[[Any], Tensor]) -> list[float]:
    optimizer, losses = SGD(module.parameters(), lr=0.001), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(pick(module(**batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_alike(plain: nn.Module, placed: nn.Module) -> None:
    """Gradients, weights and buffers, each by its size: where a gradient is nothing but rounding there is none."""
    others = dict(placed.named_parameters())
    for name, each in plain.named_parameters():
        other = others[name]
        assert torch.allclose(other, each, rtol=1e-4, atol=1e-5), name
        assert (each.grad is None) == (other.grad is None), name
        if each.grad is not None and other.grad is not None:
            largest = float(each.grad.abs().max())
            assert torch.allclose(other.grad, each.grad, rtol=1e-3, atol=1e-4 * largest + 1e-5), name
    for (name, one), (_, two) in zip(plain.named_buffers(), placed.named_buffers(), strict=True):
        assert torch.allclose(two, one, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_placed_module_trains_as_it_would_on_one_device(name: str, num_microbatches: int) -> None:
    module, batch, pick = MODELS[name]()
    plain = copy.deepcopy(module)
    expected = train_plainly(plain, batch, pick, num_microbatches)
    placed = place(module, PLACES, microbatches=num_microbatches)
    before = set(threading.enumerate())
    assert train_placed(placed, batch, pick) == pytest.approx(expected, rel=1e-4)
    assert_alike(plain, placed)
    # Threads that other tests left may end meanwhile; none may have come.
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_gradients(schedule: str) -> None:
    module = Net(num_blocks=8)
    plain = copy.deepcopy(module)
    ids = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(0))
    loss_of(plain(ids)).backward()  # type: ignore[no-untyped-call]
    placed = place(module, PLACES, microbatches=4, schedule=schedule)
    loss_of(placed(ids)).backward()  # type: ignore[no-untyped-call]
    assert_alike(plain, placed)


def test_three_places_of_different_speed_and_a_batch_that_does_not_divide() -> None:
    module = Net(num_blocks=8)
    plain = copy.deepcopy(module)
    ids = torch.randint(0, 11, (7, 5), generator=torch.Generator().manual_seed(0))
    loss_of(plain(ids)).backward()  # type: ignore[no-untyped-call]
    placed = place(module, ["cpu:0", "cpu:1", "cpu:2"], microbatches=4, speeds={"cpu:0": 4.0})
    loss_of(placed(ids)).backward()  # type: ignore[no-untyped-call]
    assert_alike(plain, placed)
    on_first = [name for name, each in placed.where.items() if each.name == "cpu:0"]
    assert len(on_first) > len(placed.where) / 2
    # Fewer rows than microbatches, afterwards.
    placed.zero_grad()
    plain.zero_grad()
    loss_of(plain(ids[:2])).backward()  # type: ignore[no-untyped-call]
    loss_of(placed(ids[:2])).backward()  # type: ignore[no-untyped-call]
    assert_alike(plain, placed)


def test_two_forwards_before_a_backward_are_two() -> None:
    module = Net(num_blocks=4)
    plain = copy.deepcopy(module)
    first, second = torch.randint(0, 11, (2, 4, 5), generator=torch.Generator().manual_seed(0))
    (loss_of(plain(first)) * loss_of(plain(second))).backward()  # type: ignore[no-untyped-call]
    placed = place(module, PLACES, microbatches=2)
    (loss_of(placed(first)) * loss_of(placed(second))).backward()  # type: ignore[no-untyped-call]
    assert_alike(plain, placed)


def test_inputs_that_want_a_gradient_get_it() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(module)
    one = torch.randn(8, 3, requires_grad=True)
    other = one.detach().clone().requires_grad_()
    loss_of(plain(one * 2)).backward()  # type: ignore[no-untyped-call]
    loss_of(place(module, PLACES, microbatches=4)(other * 2)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(other.grad, one.grad)


def test_under_autocast_places_compute_as_the_caller_would() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    placed = place(copy.deepcopy(module), PLACES, microbatches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = placed(x)
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output, module(x))
