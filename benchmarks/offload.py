"""Plans that keep something on the host, beside one GPU: the same training bit for bit, and how fast, beside FSDP2.

Needs a GPU. The model is a Llama-3B with random weights, on random tokens. FSDP2 trains the same module, with all that
it can offload on the host and the whole batch at once, which is faster for it. Each case has a process of its own:
pinned memory of one would be missing to the next.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/offload.py                              everything
    CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/offload.py bits none optimizer          some

What is measured is laid over what the file of results has of other cases.
"""

import subprocess
import sys
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from record import kept, record
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer

SMALL = Settings(
    vocabulary=1000,
    width=512,
    num_layers=6,
    length=256,
    attention=Heads(num_heads=8, num_kv_heads=4, head_dim=64),
    mlp=Mlp(width=1376),
    tied=False,
)
LARGE = Settings(
    vocabulary=128_256,
    width=3072,
    num_layers=28,
    length=2048,
    attention=Heads(num_heads=24, num_kv_heads=8, head_dim=128),
    mlp=Mlp(width=8192),
    tied=True,
)
ROWS, LENGTH = 8, 2048
OPTIMIZER = partial(AdamW, lr=1e-4, fused=True)
#: Plans that are held against the same without a host, and the norm to clip to.
PLAINLY = (("microbatches=2", None), ("microbatches=2,precision=bf16", None), ("microbatches=2", 0.1))
ON_HOST = ("offload.optimizer=1", "offload.parameters=1", "offload.activations=1")
#: Of the large model: what is beside `precision=bf16`, and the norm to clip to.
MEASURED = {
    "none": ("microbatches=2", None),
    "optimizer": ("microbatches=2,offload.optimizer=1", None),
    "clipped": ("microbatches=2,offload.optimizer=1", 1.0),
    "parameters": ("microbatches=2,offload.parameters=1", None),
    "parameters_at_once": ("microbatches=1,offload.parameters=1", None),
}


def make(settings: Settings) -> Transformer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = Transformer(settings)
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(0, 0.02) if each.dim() > 1 else each.fill_(1)
    return module.cuda().train()


def batch_of(settings: Settings, rows: int, length: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(settings.vocabulary, (rows, length + 1), generator=generator).cuda()
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def trained(plan: str, clip: float | None) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and weights of a few steps of the small model, and the bytes on the host."""
    batches = [batch_of(SMALL, 8, 128, step) for step in range(4)]
    with parallelize(
        make(SMALL), plan, loss=next_token_loss, optimizer=OPTIMIZER, example=batches[0], clip=clip
    ) as engine:
        losses = [engine.train_step(each) for each in batches]
        return losses, {name: each.cpu().clone() for name, each in engine.state_dict().items()}, engine.host_bytes


def bits() -> dict[str, Any]:
    """The largest difference of a loss or a weight from the same plan without a host."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, Any] = {}
    for plan, clip in PLAINLY:
        losses, weights, _ = trained(plan, clip)
        for host in ON_HOST:
            our_losses, our_weights, host_bytes = trained(f"{plan},{host}", clip)
            worst = max(float((each.float() - weights[name].float()).abs().max()) for name, each in our_weights.items())
            worst = max(worst, *(abs(one - other) for one, other in zip(our_losses, losses, strict=True)))
            found[f"{plan},{host}{'' if clip is None else f', clip={clip}'}"] = {
                "worst": worst,
                "host_bytes": host_bytes,
            }
    torch.use_deterministic_algorithms(False)
    return found


def measured(step: Any, num_steps: int = 3) -> dict[str, Any]:
    """Tokens/s of steps, after two that make what is made once. Each step gets its number."""
    for number in range(2):
        step(number)
    torch.cuda.synchronize()
    start = perf_counter()
    for number in range(2, 2 + num_steps):
        step(number)
    torch.cuda.synchronize()
    seconds = (perf_counter() - start) / num_steps
    return {
        "seconds": seconds,
        "tokens_per_second": ROWS * LENGTH / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def ours(plan: str, clip: float | None) -> dict[str, Any]:
    plan = f"precision=bf16,{plan}"
    batches = [batch_of(LARGE, ROWS, LENGTH, step) for step in range(5)]
    with parallelize(
        make(LARGE), plan, loss=next_token_loss, optimizer=OPTIMIZER, example=batches[0], clip=clip
    ) as engine:
        found = measured(lambda number: engine.train_step(batches[number]))
        return {"plan": plan, "clip": clip, **found, "host_gb": engine.host_bytes / 1e9}


def theirs() -> dict[str, Any]:
    """The same training by FSDP2 with everything on the host, on one rank."""
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method="tcp://127.0.0.1:29579", rank=0, world_size=1)
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
        "mesh": init_device_mesh("cuda", (1,)),
    }
    model = make(LARGE)
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = OPTIMIZER(model.parameters())
    batches = [batch_of(LARGE, ROWS, LENGTH, step) for step in range(5)]

    def step(number: int) -> None:
        total, count = next_token_loss(model(batches[number]["input_ids"]), batches[number])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = measured(step)
    dist.destroy_process_group()
    return found


def run(name: str) -> dict[str, Any]:
    try:
        return bits() if name == "bits" else theirs() if name == "fsdp2" else ours(*MEASURED[name])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main(names: list[str]) -> int:
    if len(names) > 1:
        for name in names:
            subprocess.run([sys.executable, __file__, name], check=True)
        return 0
    (name,) = names
    results: dict[str, Any] = {**kept("offload"), "device": torch.cuda.get_device_name(), name: run(name)}
    print(name, results[name], flush=True)
    rates = {name: each["tokens_per_second"] for name, each in results.items() if "tokens_per_second" in each}
    if "fsdp2" in rates:
        results["over_fsdp2"] = {name: rate / rates["fsdp2"] for name, rate in rates.items() if name != "fsdp2"}
        print("over FSDP2:", results["over_fsdp2"])
    record("offload", results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bits", *MEASURED, "fsdp2"]))
