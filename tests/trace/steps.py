"""Real steps under real plans, to see whether what is said of them adds up."""

import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.stages.stage import Batch
from shardwise.trace.events import Trace

SETTINGS = Settings(
    vocabulary=64,
    width=32,
    num_layers=4,
    length=32,
    attention=Heads(num_heads=4, num_kv_heads=4, head_dim=8),
    mlp=Mlp(width=64),
)


def a_batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def summed(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels = batch["labels"]
    total = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


def traced_step(plan: str, sleeps: dict[int, float] | None = None, data_wait: float = 0.0) -> Trace:
    """A trace of one of a few steps. A rank may sleep in its forwards."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    # Four layers where there are as many stages, and where layers sleep.
    is_deep = sleeps is not None or "zb-v" in plan or "pp=4" in plan
    module = Transformer(replace(SETTINGS, num_layers=4 if is_deep else 2))
    initialise(module, seed=5)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    seconds = (sleeps or {}).get(rank, 0.0)
    if seconds:
        for layer in module.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    engine = parallelize(
        module, plan, loss=summed, optimizer=lambda each: AdamW(each, lr=1e-3), example=a_batch(0), clip=1.0
    )
    engine.train_step(a_batch(1))
    engine.train_step(a_batch(2), trace=True, data_wait=data_wait)
    trace = engine.trace
    engine.close()
    assert trace is not None, "it was recorded"
    return trace
