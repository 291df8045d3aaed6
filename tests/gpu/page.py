"""docs/gpu.md: what was run on real GPUs, made from the record that `tests/gpu/every_plan.py` keeps."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
RECORD = ROOT / "benchmarks" / "results" / "gpu_plans.json"

_HEAD = """\
# On GPUs

    shardwise train tiny                                                 on the GPU that is there
    shardwise check --plan dp=2,tp=2,pp=2,microbatches=2 --device cuda   eight ranks on one GPU, against one device
    shardwise train tiny --devices 2 --plan dp=2 --share-gpus            the run of two GPUs, on one

**Which device.** A rank computes where its module or its batch is. What was left elsewhere (a buffer, a batch that a
loader made on the CPU, a module on the CPU whose batches are on the GPU) is moved there by `parallelize` and
`train_step`. Where all of it is on the CPU, it stays there; unless the processes talk over NCCL: then each has its own
GPU, or the one that it shares. A module on several GPUs is refused. All of this was tried with one GPU: `torchrun` on
several of them was not.

**How ranks talk.** Groups over NCCL, and between two stages a group of two for each direction, on streams of their own.
Where only gloo connects the processes, values go by way of pinned host memory. Two settings of CUDA are made before it
starts, unless they are set already: `CUDA_DEVICE_MAX_CONNECTIONS=32` and `CUDA_MODULE_LOADING=EAGER`. With the defaults
a pipeline can stand still: a receive is a kernel that runs until the other rank has sent, and must not be waited for by
another stream, or by the loading of a kernel.

**Ranks that share a GPU.** NCCL refuses two ranks on one device. With `--device cuda` (`check`), `--share-gpus`
(`train`) or `gpus="shared"` (`spawn`, `Ranks`), each rank is told that it is a machine of its own, and NCCL goes over
loopback sockets. That is for checking plans: it is slow, and says nothing of speed.

## Every plan, against one device

`make test-gpu` trains all plans of [composition.md](composition.md) for 3 steps of AdamW in fp32 on the GPUs of a
machine, and holds losses, norms, gradients and weights against plain torch on one of them. It needs torch and, for four
models, `transformers`; nothing is installed. What is left out is said. Errors are relative, the worst over all tensors
and ranks; 1e-5 is what we promise.
"""


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def page(record: dict[str, Any]) -> str:
    rows = record["rows"]
    passed = [row for row in rows if row["problem"] is None]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    gpus = f"{record['gpus']} x {record['device']}"
    parts = [
        f"{_HEAD}\n{len(passed)} of {len(rows)} plans passed on {record['date']}, on {gpus} with {versions}, NCCL"
        f" {record['nccl']}."
    ]
    parts += [f"Left out: {each}." for each in record["left_out"]]
    for count in sorted({row["ranks"] for row in rows}):
        lines = [_line(row) for row in rows if row["ranks"] == count]
        head = "| plan | model | loss | gradient | norm | weight |\n|---|---|---|---|---|---|"
        parts.append(f"### {count} ranks: {len(lines)} plans\n\n{head}\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> str:
    errors = [f"{error:.1e}" for error in row["errors"].values()]
    told = errors if row["problem"] is None else [row["problem"], "", "", ""]
    return f"| `{row['plan']}` | {row['model']} | {' | '.join(told)} |"
