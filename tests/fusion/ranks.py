"""What ranks run in tests of kernels over ranks. They are imported by the processes that `Ranks` starts."""

from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, AdamW

import shardwise as sw
from shardwise.kernels.lazy_logits import LazyLogits
from shardwise.nets.loss import next_token_loss
from tests.fusion.models import aligned_loss, make, make_batch, own_loss
from tests.kernels.interpreter import interpreted
from tests.kernels.test_nets import batch as small_batch
from tests.kernels.test_nets import model


def loss_for(plan: str) -> Any:
    return aligned_loss if "cp" in plan else own_loss


def trained(name: str, plan: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[bool], str]:
    """Losses of a step and of an evaluation after it, gradients, whether logits waited at each loss, what is said."""
    waited: list[bool] = []

    def loss(output: Any, batch: Any) -> Any:
        made = loss_for(plan)(output, batch)
        waited.append(isinstance(output.logits, LazyLogits) and not output.logits.is_read)
        return made

    batch = make_batch()
    module = make(name)
    optimizer = partial(SGD, lr=0.1)
    engine = sw.parallelize(module, plan, loss=loss, optimizer=optimizer, example=batch, **options)
    waited.clear()
    made = [engine.train_step(batch)]
    gradients = engine.gradients()
    made.append(engine.evaluate(batch))
    said = engine.explain()
    engine.close()
    return made, gradients, waited, said


def both(cases: list[tuple[str, str]]) -> list[tuple[list[float], list[float], float, list[bool], str]]:
    """Each case with kernels, in Triton's interpreter, and without: losses of both, how far gradients are apart."""
    found = []
    for name, plan in cases:
        plain, wanted, _, _ = trained(name, plan, kernels=False)
        with interpreted(), patch.dict("os.environ", {"TRITON_INTERPRET": "1"}), np.errstate(all="ignore"):
            mine, gradients, waited, said = trained(name, plan)
        worst = max(float((gradients[key] - each).abs().max()) for key, each in wanted.items())
        found.append((mine, plain, worst, waited, said))
    return found


def with_a_head_that_is_cut() -> list[tuple[float, str]]:
    """The loss of a model of ours under tp=2, without kernels and with, and what its head is."""
    found = []
    for kernels in (False, True):
        module, batch = model(), small_batch()
        with interpreted(), patch.dict("os.environ", {"TRITON_INTERPRET": "1"}), np.errstate(all="ignore"):
            engine = sw.parallelize(
                module, "tp=2", loss=next_token_loss, optimizer=partial(SGD, lr=0.1), example=batch, kernels=kernels
            )
            loss = [engine.train_step(batch), engine.train_step(batch)][-1]
            found.append((loss, type(module.head).__name__))
            engine.close()
    return found


def stepped(plans: list[str], dtype: torch.dtype) -> list[tuple[float, int, str]]:
    """Each plan with fused AdamW: how far weights are from those of torch's steps, launches, and what is said."""
    found = []
    with interpreted(), patch.dict("os.environ", {"TRITON_INTERPRET": "1"}), np.errstate(all="ignore"):
        launcher = import_module("shardwise.kernels.adamw_triton")
        for plan in plans:
            with patch.object(launcher, "launch_adamw", wraps=launcher.launch_adamw) as counted:
                with patch("shardwise.engine.make_states.use_kernels", lambda *_: None):
                    plain = _stepped(plan, dtype)[0]
                assert not counted.called
                mine, said = _stepped(plan, dtype)
            worst = max(float((mine[key] - each).abs().max()) for key, each in plain.items())
            found.append((worst, counted.call_count, said))
    return found


def _stepped(plan: str, dtype: torch.dtype, **options: Any) -> tuple[dict[str, torch.Tensor], str]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 8)).to(dtype)
    batch = {"input": torch.randn(4, 8, dtype=dtype), "y": torch.randn(4, 8, dtype=dtype)}
    if dtype is torch.bfloat16:
        plan, options = f"{plan},precision=bf16", options | {"masters": False}
    engine = sw.parallelize(
        module, plan, loss=lambda output, batch: (output - batch["y"]).float().square().mean(), example=batch,
        optimizer=partial(AdamW, lr=1e-2, fused=True), clip=1.0, **options,
    )  # fmt: skip
    for _ in range(3):
        engine.train_step(batch)
    found = engine.state_dict(), engine.explain()
    engine.close()
    return found
