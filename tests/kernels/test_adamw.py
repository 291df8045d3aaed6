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


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, after: int = 0) -> Tensor:
    """Random numbers, so many elements after a place where vectors may begin."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cpu").to(dtype).flatten()
    return torch.cat([made[:0].new_zeros(after), made]).to(torch.empty(0).device)[after:].view(shape)


def trained(
    kind: Any, dtype: torch.dtype, *, ours: bool, divisor: float | None = None, as_float64: bool = False,
    after: tuple[int, ...] = (0,), **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Weights, moments and gradients after some steps of torch's optimizer; `after`, in turn, each weight begins."""
    weights = [drawn(shape, dtype, number, after[number % len(after)]) for number, shape in enumerate(SHAPES)]
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


@pytest.mark.parametrize("after", [(0,), (0, 1, 3)], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(AdamW, {"weight_decay": 0.1}), (Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}), (AdamW, {"divisor": 3.0})],
    ids=["AdamW", "Adam", "divided"],
)
def test_steps_are_those_of_torch(
    kind: Any, options: Any, dtype: torch.dtype, after: tuple[int, ...], launcher: Any, launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No further from float64 than torch's own is, but for rounding."""
    monkeypatch.setattr(launcher, "RUN", 2 * launcher.BLOCK)
    mine = trained(kind, dtype, ours=True, after=after, **options)
    theirs = trained(kind, dtype, ours=False, **options)
    assert launches == [len(SHAPES)] * STEPS
    exact = trained(kind, dtype, ours=False, as_float64=True, **options)
    for one, other, whole in zip(mine, theirs, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.numel():
            scale = whole.abs().clamp(min=float(whole.abs().mean()))
            errors = [float(((each.double() - whole).abs() / scale).max()) for each in (one, other)]
            assert errors[0] <= 1.5 * errors[1] + 4 * STEP[dtype], errors


def test_bits_do_not_depend_on_where_numbers_are_and_who_updates_them(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for after, blocks in (((0,), 1), ((0,), 3), ((1, 0), 2)):
        monkeypatch.setattr(launcher, "RUN", blocks * launcher.BLOCK)
        found.append(trained(AdamW, torch.bfloat16, ours=True, divisor=7.0, after=after))
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


def test_places_are_kept_until_tensors_are_elsewhere(launcher: Any) -> None:
    """Steps with the same gradients find their table again, and one with others at the same sizes makes its own."""
    weight, kept = torch.nn.Parameter(drawn((3000,), torch.float32, 0)), launcher._ROWS._kept
    optimizer, gradients = AdamW([weight], fused=True), [drawn((3000,), torch.float32, seed) for seed in (1, 2)]
    kept.clear()
    sizes = []
    for turn in (0, 0, 1, 0, 1):
        weight.grad = gradients[turn]
        with kernels.fused_adam():
            optimizer.step()
        sizes.append(len(kept))
    assert sizes == [1, 1, 2, 2, 2]
    twin = torch.nn.Parameter(drawn((3000,), torch.float32, 0))
    plain = AdamW([twin], fused=True)
    for turn in (0, 0, 1, 0, 1):
        twin.grad = gradients[turn]
        plain.step()
    torch.testing.assert_close(weight, twin, rtol=1e-6, atol=1e-7)


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
