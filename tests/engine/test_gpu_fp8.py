"""Products of 8-bit numbers on a GPU that has them: the definition's numbers, compiled or not, and a training."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.engine.parallelize import parallelize
from shardwise.kernels.fp8 import E4M3, E5M2, Scales, fp8_linear, has_products, quantise_both
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_products(CUDA), reason="no GPU with products of 8-bit numbers"
)
SCALES: tuple[Scales, ...] = ("tensor", "row")


def relative(one: Tensor, other: Tensor) -> float:
    return float(((one.float() - other.float()).norm() / other.float().norm()).detach())


def given(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (rows, 1024), (3072, 1024), (3072,)
    return tuple(torch.randn(shape, device=CUDA).to(dtype).requires_grad_() for shape in shapes)


def everything(run: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    made = run(*tensors)
    slope = torch.sin(torch.arange(made.numel(), device=CUDA)).view_as(made).to(made)
    return [made, *torch.autograd.grad(made, tensors, slope)]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [2048, 1003])
def test_products_of_the_gpu_are_those_of_the_definition(rows: int, dtype: torch.dtype, scales: Scales) -> None:
    tensors = given(rows, dtype)
    mine = everything(lambda *args: fp8_linear(*args, scales=scales), tensors)
    plain = everything(lambda *args: fp8_linear(*args, scales=scales, products=False, kernels=False), tensors)
    for one, other in zip(mine, plain, strict=True):
        assert one.dtype is other.dtype
        assert relative(one, other) < 5e-3  # Output in bfloat16, and forwards that keep 14 bits between.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scales", SCALES)
def test_a_compiler_makes_one_graph_of_it_with_the_same_numbers(scales: Scales) -> None:
    tensors = given(2048, torch.bfloat16)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fp8_linear(torch.nn.functional.silu(x), weight, bias, scales=scales, products=True)

    compiled = torch.compile(run, fullgraph=True)
    # Where it is compiled, what goes into a product is not rounded to 16 bits before: some of 8 bits are others.
    for one, other in zip(everything(compiled, tensors), everything(run, tensors), strict=True):
        assert relative(one, other) < 2e-2


@pytest.mark.parametrize("scales", SCALES)
def test_casts_of_large_tensors_are_those_of_the_definition(scales: Scales) -> None:
    x = torch.randn(4099, 8208, device=CUDA, dtype=torch.bfloat16)
    for kind in (E4M3, E5M2):
        mine, plain = (quantise_both(x, kind, scales, kernels=kernels) for kernels in (True, False))
        for one, other in zip(mine, plain, strict=True):
            assert one is not None
            assert other is not None
            torch.testing.assert_close(one.scale, other.scale)
            assert (one.numbers.float() != other.numbers.float()).float().mean() < 1e-3


def losses(precision: str, *, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    settings = Settings(
        vocabulary=512, width=256, num_layers=4, length=256,
        attention=Heads(num_heads=4, num_kv_heads=2, head_dim=64), mlp=Mlp(width=1024),
    )  # fmt: skip
    with CUDA:
        module = Transformer(settings).to(torch.bfloat16)
        ids = torch.randint(512, (8, 257))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    with parallelize(
        module, f"precision={precision}", loss=next_token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        example=batch, compile=compiled,
    ) as engine:  # fmt: skip
        return [engine.train_step(batch) for _ in range(20)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_in_fp8_is_that_in_bf16(compiled: bool) -> None:
    wide = losses("bf16", compiled=compiled)
    for precision in ("fp8", "fp8-rows"):
        found = losses(precision, compiled=compiled)
        assert wide[-1] < 0.8 * wide[0]
        assert found[-1] == pytest.approx(wide[-1], rel=0.03)
