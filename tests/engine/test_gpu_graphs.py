"""Steps captured as CUDA graphs, on a GPU: bit for bit those that are not, and replayed by one launch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Dropout, Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.stages.stage import Batch
from shardwise.torch_private import DeviceProfiler

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def tokens(seed: int, rows: int = 4, length: int = 64) -> dict[str, Tensor]:
    ids = torch.randint(0, 512, (rows, length + 1), generator=torch.Generator().manual_seed(seed)).cuda()
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def a_transformer(dropout: float = 0.0, dtype: torch.dtype = torch.bfloat16, layers: int = 4) -> Transformer:
    torch.manual_seed(0)
    settings = Settings(
        vocabulary=512, width=128, num_layers=layers, length=64, mlp=Mlp(width=256),
        attention=Heads(num_heads=4, num_kv_heads=2, head_dim=32), dropout=Dropout(residual=dropout),
    )  # fmt: skip
    return Transformer(settings).cuda().to(dtype)


def an_engine(
    module: nn.Module, *, plan: str = "precision=bf16", loss: Any = next_token_loss, **options: Any
) -> Engine:
    torch.manual_seed(1)
    return parallelize(
        module, plan, loss=loss, example=tokens(0), clip=1.0, masters=False,
        optimizer=lambda given: AdamW(given, lr=1e-3, fused=True), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "plan", ["precision=bf16", "precision=bf16,microbatches=2", "pp=2,microbatches=2,schedule=zb-h1,precision=bf16"]
)
def test_captured_steps_are_bit_for_bit_those_that_are_not(plan: str) -> None:
    courses = []
    for graphs in (False, True):
        engine = an_engine(a_transformer(0.0), plan=plan, graphs=graphs)
        torch.manual_seed(2)
        numbers = list[tuple[float, float | None, bool]]()
        for step in range(8):
            engine.optimizers[0].param_groups[0]["lr"] = 1e-3 / (step + 1)
            if step % 2:
                numbers.append(engine.launch_step(tokens(step)).read())
            else:
                loss = engine.train_step(tokens(step))
                numbers.append((loss, engine.gradient_norm, engine.was_finite))
        courses.append((numbers, {name: each.clone() for name, each in engine.state_dict().items()}))
        said = engine.explain()
        engine.close()
    assert "captured as CUDA graphs: 1 so far" in said
    (expected, weights), (found, others) = courses
    assert [tuple(each) for each in found] == [tuple(each) for each in expected]
    assert all(torch.equal(others[name], each) for name, each in weights.items())


def test_a_replay_is_one_launch_of_the_host() -> None:
    engine = an_engine(a_transformer(), graphs=True)
    for step in range(4):
        engine.launch_step(tokens(step)).read()
    torch.cuda.synchronize()
    counts = []
    for _ in range(2):  # The first look starts what looks.
        profiler = DeviceProfiler()
        profiler.start()
        engine.launch_step(tokens(9)).read()
        torch.cuda.synchronize()
        names = [each.name() for each in profiler.stop()]
        counts.append((sum("GraphLaunch" in name for name in names), sum("LaunchKernel" in name for name in names)))
    launches, kernels = counts[-1]
    assert launches == 1
    assert kernels < 60, "the update, and a copy of the batch"


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = a_transformer(layers=1)

    def forward(self, input_ids: Tensor) -> Any:
        if input_ids.float().mean().item() < 0:
            input_ids = input_ids + 1
        return self.inner(input_ids)


def test_a_forward_that_asks_the_gpu_for_a_number_is_run_as_it_is_and_named(logged: list[str]) -> None:
    def loss(output: Any, batch: Batch) -> Any:
        return next_token_loss(output, batch)

    plain, engine = (an_engine(Asks(), loss=loss, graphs=graphs) for graphs in (False, True))
    for step in range(5):
        assert engine.train_step(tokens(step)) == plain.train_step(tokens(step))
    assert "not captured as CUDA graphs: the host waits for the GPU at test_gpu_graphs.py" in "\n".join(logged)


def test_two_shapes_are_two_graphs_and_what_is_looked_at_is_run_as_it_is() -> None:
    plain, engine = (an_engine(a_transformer(), graphs=graphs) for graphs in (False, True))
    for step in range(10):
        batch = tokens(step, rows=4 if step % 2 else 2)
        assert engine.train_step(batch, trace=step == 8) == plain.train_step(batch, trace=step == 8)
    assert "captured as CUDA graphs: 2 so far" in engine.explain()
    for name, each in plain.gradients().items():
        assert torch.equal(engine.gradients()[name], each)


def test_a_model_bound_by_launches_is_captured_by_itself() -> None:
    engine = an_engine(a_transformer(layers=12), graphs="auto")
    for _ in range(6):
        engine.launch_step(tokens(0))
    torch.cuda.synchronize()
    assert "captured as CUDA graphs: 1 so far" in engine.explain()
