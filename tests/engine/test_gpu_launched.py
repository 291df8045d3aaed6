"""Steps that are launched and read later: the same numbers, and weights that no step spoils that was not finite."""

import math
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.stages.stage import Batch
from tests.stages.pieces import Net

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def tokens(device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "factor": torch.ones(8, device=device)}


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    labels: Tensor = batch["labels"]
    total = cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum") * batch["factor"].mean()
    return total, (labels >= 0).sum()


def adamw(parameters: Iterable[nn.Parameter], *, fused: bool = True) -> Optimizer:
    return AdamW(parameters, lr=1e-2, fused=fused)


def an_engine(
    device: str,
    plan: str = "dp=1",
    clip: float | None = 0.5,
    fused: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Engine:
    torch.manual_seed(0)
    module = Net(num_blocks=3).to(device, dtype)
    optimizer = partial(adamw, fused=fused)
    return parallelize(module, plan, loss=loss, optimizer=optimizer, example=tokens(device), clip=clip)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", ["dp=1", "dp=1,microbatches=4", "pp=2,microbatches=2,schedule=zb-h1"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_launched_steps_are_those_that_are_waited_for(device: str, plan: str, clip: float | None) -> None:
    waits, launches = (an_engine(device, plan, clip) for _ in range(2))
    assert launches.launch_step(tokens(device, 9)).read().loss == waits.train_step(tokens(device, 9))
    for seed in range(4):
        batch = tokens(device, seed)
        expected = waits.train_step(batch)
        launched = launches.launch_step(batch)
        assert launched.was_deferred
        found = launched.read()
        assert found.loss == pytest.approx(expected, rel=1e-6)
        assert found.was_finite
        if clip is None:
            assert found.gradient_norm is None
        else:
            assert found.gradient_norm == pytest.approx(waits.gradient_norm, rel=1e-5)
    for name, expected_gradient in waits.gradients().items():
        assert torch.allclose(launches.gradients()[name], expected_gradient, rtol=1e-5, atol=1e-7)
    for name, weight in waits.state_dict().items():
        assert torch.allclose(launches.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [0.5, None])
def test_from_a_step_that_is_not_finite_on_all_are_left_out_until_the_host_has_seen_it(
    device: str, clip: float | None
) -> None:
    engine = an_engine(device, clip=clip)
    engine.launch_step(tokens(device))
    weights = {name: each.clone() for name, each in engine.state_dict().items()}
    states = [each.clone() for state in engine.optimizers[0].state.values() for each in state.values()]
    wrong = {**tokens(device, 1), "factor": torch.full((8,), math.nan, device=device)}
    steps = [engine.launch_step(batch) for batch in (wrong, tokens(device, 2), tokens(device, 3))]
    assert [step.read().was_finite for step in steps] == [False, False, False]
    assert math.isnan(steps[0].read().loss)
    assert math.isfinite(steps[1].read().loss)
    assert all(torch.equal(weights[name], each) for name, each in engine.state_dict().items())
    after = [each for state in engine.optimizers[0].state.values() for each in state.values()]
    assert all(map(torch.equal, states, after)), "the optimizer has not counted them either"
    engine.go_on()
    assert engine.launch_step(tokens(device, 2)).read().was_finite
    assert not all(torch.equal(weights[name], each) for name, each in engine.state_dict().items())


def test_where_the_host_must_ask_a_launched_step_is_over_at_once() -> None:
    engine = an_engine("cpu", fused=False)
    launched = engine.launch_step(tokens())
    assert launched.is_over
    assert not launched.was_deferred
    assert launched.read().gradient_norm == engine.gradient_norm
    module = Net(num_blocks=2)
    plain = parallelize(
        module, "dp=1", loss=loss, optimizer=lambda given: SGD(given, lr=0.1), example=tokens(), clip=1.0
    )
    assert not plain.launch_step(tokens()).was_deferred


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_on_16_bit_weights_copies_and_scales_no_gradient_and_keeps_none(device: str) -> None:
    engine = an_engine(device, clip=None, dtype=torch.bfloat16)
    batch = tokens(device)
    engine.train_step(batch)
    shapes = {tuple(each.shape) for each in engine.module.parameters() if each.dim() > 1}
    held: list[bool] = []
    hook = register_module_forward_hook(
        lambda *_: held.extend(each.grad is not None for each in engine.module.parameters())
    )
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        engine.train_step(batch)
    hook.remove()
    assert held
    assert not any(held)
    found = [event.name for event in profiled.events() if event.name == "aten::_foreach_mul_"]
    copied = [each.input_shapes[0] for each in profiled.events() if each.name == "aten::copy_"]
    assert not found
    assert not [shape for shape in copied if tuple(shape) in shapes]
    assert engine.launch_step(batch).was_deferred


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_that_optimizers_were_given_also_where_these_divide(device: str) -> None:
    divides, scales = an_engine(device, clip=0.01), an_engine(device, clip=0.01, fused=False)
    for engine in (divides, scales):
        engine.train_step(tokens(device))
    expected = scales.gradients()
    for name, each in divides.gradients().items():
        torch.testing.assert_close(each, expected[name])
