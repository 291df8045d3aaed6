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

**When a rank is lost.** Over NCCL a host does not wait for a collective: its GPU does. So every rank also tells the
others how far its GPU has come. One that dies is named at once by whoever started the ranks, one that stalls or does
not come is named after 20 s (`limit_seconds`); then communicators are aborted, so that no kernel stays, and every rank
raises `RankError` with the place of all. A process whose host does not come back even so is ended with that sentence
(status 70). Weights in memory after a `RankError` are not to be saved: kernels that were aborted leave anything there.
torch's own reaction, to abort the process first, is switched off (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, unless it is set
already). What was tried on an H200 is [below](#ranks-that-are-lost). A group that cannot connect is given up after 60
s, with the interfaces of the machine and what to set; so far that has been made to happen on CPUs alone.

## Every plan, against one device

`make test-gpu` runs everything on this page, on a machine with one GPU or several: every plan of
[composition.md](composition.md) in fp32 and in bf16 with 2, 4 and 8 ranks, models of Hugging Face, ranks that are
lost, what ranks ask of NCCL against what CPUs rehearse ([nccl.md](nccl.md)), bad input, commands as they are typed,
and all tests that ask for a GPU. It needs torch and, for some models, `transformers` and `pytest`; nothing is
installed, and what is left out or skipped is said. It writes `build/gpu_tests.jsonl` and this page. `make test-gpu
SECONDS=560` stops in time, with status 3, and goes on when it is called again; `python -m tests.gpu --only faults` is
one part of it.

How to read a row: the plan is trained for 3 steps of AdamW in fp32 and held against plain torch on one GPU. An error
is relative, the worst over all steps, tensors and ranks: of the loss, of a gradient, of the gradients' norm and of a
weight. 1e-5 is what we promise, and 1e-7 is a last bit of fp32. Models are small: ours by what is special about them
(`tied`: the embedding is the head too; `experts`: a mixture; `latent`: DeepSeek's attention; `windows`: a sliding
one), those of Hugging Face by their family.
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
    if record.get("bf16"):
        parts.append(_in_bf16(record["bf16"]))
    if record.get("families"):
        parts.append(_of_families(record["families"]))
    if record.get("faults"):
        parts.append(_of_faults(record["faults"]))
    if record.get("others"):
        parts.append(_of_others(record["others"]))
    return "\n\n".join(parts) + "\n"


_BF16 = """\
## The same in bf16

A plan in bf16 is to be as close to fp32 as one device in bf16 is. Errors are relative to one device's fp32: the root of
the mean square over all tensors (of losses and norms, over the steps), of the plan and, behind the stroke, of one
device. A plan passes if its mean is at most twice one device's, no tensor is off by more than four times what it, or
the mean tensor, is off by there, and losses and norms by no more than twice or 2^-9 (`parity/rounding.py`)."""


def _in_bf16(rows: list[dict[str, Any]]) -> str:
    passed = [row for row in rows if row["problem"] is None]
    head = "| plan | model | loss | norm | gradient | weight |\n|---|---|---|---|---|---|"
    lines = [_beside(row) for row in rows]
    return "\n\n".join([_BF16, f"{len(passed)} of {len(rows)} plans passed.", f"{head}\n" + "\n".join(lines)])


def _beside(row: dict[str, Any]) -> str:
    kinds = ("loss", "norm", "gradient", "weight")
    told = [f"{row['errors'][kind]:.1e} / {row['alone'][kind]:.1e}" for kind in kinds if row["alone"]]
    told = told if row["problem"] is None else [row["problem"], "", "", ""]
    return f"| `{row['plan']}` | {row['model']} | {' | '.join(told)} |"


def _of_families(rows: list[dict[str, Any]]) -> str:
    """A line for each family, a column for each plan and precision: the worst gradient, or that of bf16 beside."""
    columns = list(dict.fromkeys((row["plan"], row["precision"]) for row in rows))
    by_family: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        told = f"{row['errors'].get('gradient', 0.0):.1e}" if row["problem"] is None else row["problem"]
        if row["problem"] is None and row["alone"]:
            told += f" / {row['alone']['gradient']:.1e}"
        by_family.setdefault(row["model"].removeprefix("family "), {})[row["plan"], row["precision"]] = told
    head = "| family | " + " | ".join(f"`{plan}` {precision}" for plan, precision in columns) + " |"
    rule = "|---" * (len(columns) + 1) + "|"
    lines = [
        f"| {name} | " + " | ".join(cells.get(each, "") for each in columns) + " |" for name, cells in by_family.items()
    ]
    passed = sum(row["problem"] is None for row in rows)
    intro = (
        "## Models of Hugging Face\n\nOne small model of each family, unmodified: the error of the gradients, in fp32"
        f" the worst tensor's, in bf16 the mean and one device's. {passed} of {len(rows)} passed."
    )
    return "\n\n".join([intro, "\n".join([head, rule, *lines])])


def _of_faults(rows: list[dict[str, Any]]) -> str:
    """What happened to which rank, and how soon it was named."""
    head = "| started by | plan | what | rank | named after | what is said |\n|---|---|---|---|---|---|"
    lines = []
    for row in rows:
        took = "never" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        said = (row["problem"] or row["sentence"]).partition("\n")[0].replace("|", "\\|")
        said = "; ".join([said, *([row["since"]] if "since" in row else [])])
        lines.append(f"| {row['how']} | `{row['plan']}` | {row['fault']} | {row['rank']} | {took} | {said} |")
    intro = (
        "## Ranks that are lost\n\nA rank is killed (SIGKILL), stopped (SIGSTOP), raises, is late (sleeps in a step) or"
        " absent (never comes to one). Seconds are from then until whoever started the ranks was told; to save time"
        " most have a limit of 4 s in place of 20."
    )
    return "\n\n".join([intro, f"{head}\n" + "\n".join(lines)])


_PARTS = {"nccl": "programs of NCCL", "input": "bad input", "commands": "commands", "pytest": "tests"}


def _of_others(rows: list[dict[str, Any]]) -> str:
    """What ends with a status, and how long it took."""
    head = "| what | which | result | took |\n|---|---|---|---|"
    lines = []
    for row in rows:
        which = f"`{row['name']}`" if row["part"] == "pytest" else "all of them"
        # pytest ends with 5 where it finds nothing to run.
        result = {0: "passed", 5: "nothing to run"}.get(row["status"], f"failed with status {row['status']}")
        lines.append(f"| {_PARTS[row['part']]} | {which} | {result} | {row['seconds']:.0f} s |")
    return "\n\n".join(["## What else was run", f"{head}\n" + "\n".join(lines)])


def _line(row: dict[str, Any]) -> str:
    errors = [f"{error:.1e}" for error in row["errors"].values()]
    told = errors if row["problem"] is None else [row["problem"], "", "", ""]
    return f"| `{row['plan']}` | {row['model']} | {' | '.join(told)} |"
