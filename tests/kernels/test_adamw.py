"""Adam and AdamW in one pass, beside torch's own in float64 and in the dtype of the weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from shardwise import kernels
from shardwise.torch_private import FUSED_ADAMW, step_divided
from tests.kernels.against import STEP

SHAPES = ((3,), (2, 700), (5000,), (0,), (64, 64))
STEPS = 4


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(torch.empty(0).device)


def trained(
    kind: Any, dtype: torch.dtype, *, ours: bool, divisor: float | None = None, as_float64: bool = False, **options: Any
) -> list[Tensor]:
    """Weights, moments and gradients after some steps of torch's optimizer."""
    weights = [drawn(shape, dtype, number) for number, shape in enumerate(SHAPES)]
    kept = torch.float64 if as_float64 else dtype
    given = [torch.nn.Parameter(each.to(kept)) for each in weights]
    optimizer = kind(given, lr=1e-2, **({} if as_float64 else {"fused": True}), **options)
    for step in range(STEPS):
        for number, each in enumerate(given):
            each.grad = (drawn(SHAPES[number], dtype, 100 * step + number) * 10.0 ** (step - 2)).to(kept)
            if as_float64 and divisor is not None:
                each.grad /= divisor
        with kernels.fused_adam() if ours else nullcontext():
            if divisor is None or as_float64:
                optimizer.step()
            else:
                device = given[0].device
                step_divided(optimizer, torch.full((), divisor, device=device), torch.zeros((), device=device))
    found = [each.detach() for each in given]
    for each in given:
        found += [optimizer.state[each]["exp_avg"], optimizer.state[each]["exp_avg_sq"]]
        assert float(optimizer.state[each]["step"]) == STEPS
    return [*found, *[each.grad for each in given if each.grad is not None]]


@pytest.fixture
def launcher() -> Any:
    """The module of the kernel, imported where Triton interprets."""
    return import_module("shardwise.kernels.adamw_triton")


@pytest.fixture
def launches(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each launch is asked for."""
    found: list[int] = []
    launch = launcher.launch_adamw

    def counted(entries: Any, *given: Any, **options: Any) -> None:
        found.append(len(entries))
        launch(entries, *given, **options)

    monkeypatch.setattr(launcher, "launch_adamw", counted)
    return found


@pytest.mark.parametrize("small", [0, 2**19], ids=["one by one", "together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(AdamW, {"weight_decay": 0.1}), (Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}), (AdamW, {"divisor": 3.0})],
    ids=["AdamW", "Adam", "divided"],
)
def test_steps_are_those_of_torch(
    kind: Any, options: Any, dtype: torch.dtype, small: int, launcher: Any, launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No further from float64 than torch's own is, but for rounding."""
    monkeypatch.setattr(launcher, "SMALL", small)
    monkeypatch.setattr(launcher, "RUN", 2 * launcher.BLOCK)
    mine, theirs = trained(kind, dtype, ours=True, **options), trained(kind, dtype, ours=False, **options)
    assert launches == [len(SHAPES)] * STEPS
    exact = trained(kind, dtype, ours=False, as_float64=True, **options)
    for one, other, whole in zip(mine, theirs, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.numel():
            scale = whole.abs().clamp(min=float(whole.abs().mean()))
            errors = [float(((each.double() - whole).abs() / scale).max()) for each in (one, other)]
            assert errors[0] <= 1.5 * errors[1] + 4 * STEP[dtype], errors


def test_weights_that_share_a_launch_get_the_same_bits(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for small in (0, 2**19):
        monkeypatch.setattr(launcher, "SMALL", small)
        found.append(trained(AdamW, torch.bfloat16, ours=True, divisor=7.0))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_step_is_left_out_where_the_device_says_so(launches: list[int]) -> None:
    weight = torch.nn.Parameter(drawn((3000,), torch.float32, 0))
    before, optimizer = weight.detach().clone(), AdamW([weight], fused=True)
    for skips in (1.0, 0.0):
        weight.grad = drawn((3000,), torch.float32, 1)
        with kernels.fused_adam():
            step_divided(optimizer, torch.ones((), device=weight.device), torch.full((), skips, device=weight.device))
        assert torch.equal(weight.detach(), before) == bool(skips)
        assert float(optimizer.state[weight]["step"]) == 1.0 - skips
    assert launches == [1, 1]


def test_not_a_number_and_infinity_pass_through() -> None:
    weight = torch.nn.Parameter(torch.ones(5000))
    weight.grad = torch.zeros(5000)
    weight.grad[[1, 4500]] = torch.tensor([float("nan"), float("inf")])
    with kernels.fused_adam():
        AdamW([weight], fused=True).step()
    found = weight.detach()
    assert found[[1, 4500]].isnan().all()
    assert found[[0, 2, 4499, 4501]].isfinite().all()


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}], ids=str)
def test_what_the_kernel_lacks_is_done_by_torch(options: Any, launches: list[int]) -> None:
    weight = torch.nn.Parameter(drawn((64,), torch.float32, 0))
    weight.grad = drawn((64,), torch.float32, 1)
    twin = torch.nn.Parameter(weight.detach().clone())
    twin.grad = weight.grad.clone()
    AdamW([twin], fused=True, **options).step()
    with kernels.fused_adam():
        AdamW([weight], fused=True, **options).step()
    assert torch.equal(weight, twin)
    assert not launches


def test_torch_is_as_it_was_afterwards() -> None:
    with pytest.raises(RuntimeError, match="boom"), kernels.fused_adam():
        raise RuntimeError("boom")
    assert torch._fused_adamw_ is FUSED_ADAMW


def test_other_threads_step_with_torch(launches: list[int]) -> None:
    """Copies to the host are updated beside a step, by threads that no context of this one holds for."""
    weights = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    for each in weights:
        each.grad = torch.ones(5)
    mine, theirs = (AdamW([each], fused=True) for each in weights)
    with ThreadPoolExecutor(1) as other:
        with kernels.fused_adam():
            other.submit(theirs.step).result()
            assert not launches
            mine.step()
        assert launches == [1]
        other.submit(theirs.step).result()
    assert launches == [1]
    assert torch._fused_adamw_ is FUSED_ADAMW
