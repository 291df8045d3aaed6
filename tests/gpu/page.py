"""docs/gpu.md: what was run on real GPUs, made from the record that `tests/gpu/every_plan.py` keeps."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
RECORD = ROOT / "benchmarks" / "results" / "gpu_plans.json"

_HEAD = """\
# On GPUs

This page says how ranks use GPUs, how several ranks share one, what happens when a rank is lost, and which plans have
run on a GPU.

    shardwise train tiny                                                 on this machine's GPU
    shardwise check --plan dp=2,tp=2,pp=2,microbatches=2 --device cuda   eight ranks on one GPU, against one device
    shardwise train tiny --devices 2 --plan dp=2 --share-gpus            a run for two GPUs, on one

**Which device.** A rank computes on the device of its module or its batch. `parallelize` and `train_step` move what
is on another device: a buffer, a batch that a loader made on the CPU, a module on the CPU whose batches are on the
GPU. If everything is on the CPU, it stays there, unless the processes use NCCL. Then each process uses its own GPU,
or the one that it shares. A module on several GPUs is refused. All of this was tested with one GPU, not with
`torchrun` on several.

**How ranks communicate.** Ranks communicate over NCCL groups. Between two stages there is a group of two ranks for
each direction, on its own stream. If only gloo connects the processes, values go through pinned host memory. Two CUDA
variables are set at the start, unless they are set already: `CUDA_DEVICE_MAX_CONNECTIONS=32` and
`CUDA_MODULE_LOADING=EAGER`. With their default values a pipeline can deadlock. A receive is a kernel that runs until
the other rank has sent; if another stream or the loading of a kernel has to wait for it, the other rank may never
send.

**Ranks that share a GPU.** NCCL refuses two ranks on one device. With `--device cuda` (`check`), `--share-gpus`
(`train`) or `gpus="shared"` (`spawn`, `Ranks`), each rank appears to NCCL as a separate machine, and NCCL uses
loopback sockets. Use this to check plans. It is slow, and says nothing about speed.

**When a rank is lost.** With NCCL the GPU waits for a collective, and the host does not. So every rank also reports
how far its GPU has progressed.

- A rank that dies is named immediately by the process that started the ranks. A rank that stalls or never arrives is
  named after 20 s (`limit_seconds`); a rank that does not come to its first step after ten times as long, as it may
  have a loader to start.
- Then communicators are aborted, so that no kernel keeps running, and every rank raises `RankError` with the position
  of all ranks. A process whose host still does not return is ended with the same message (status 70).
- Do not save weights from memory after a `RankError`: aborted kernels can leave any values there.
- By default torch would abort the process first. This is switched off (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, unless it
  is set already).
- A group that cannot connect is abandoned after 60 s; the message lists the interfaces of the machine and what to
  set. This has been tested on CPUs only.

[Below](#ranks-that-are-lost) are the cases that were tested on an H200.

## Every plan, against one device

`make test-gpu` runs everything on this page, on a machine with one GPU or more:

- every plan of [composition.md](composition.md) in fp32 and in bf16, with 2, 4 and 8 ranks;
- Hugging Face models;
- lost ranks;
- the NCCL calls of ranks, compared with what CPUs record ([nccl.md](nccl.md));
- bad input, commands as a user types them, and all tests that need a GPU.

It needs torch and, for some models, `transformers` and `pytest`. It installs nothing, and prints what it skips. It
writes `build/gpu_tests.jsonl` and this page, and what each part printed to `build/gpu_logs`. `make test-gpu
SECONDS=560` ends what is still running after that time, with status 3, and continues when it is called again. `python
-m tests.gpu --only faults` runs one part.

How to read a row: the plan is trained for 3 steps of AdamW in fp32 and compared with plain torch on one GPU. Errors
of the loss, of gradients, of the gradient norm and of weights are relative; each is the worst over all steps, tensors
and ranks. The limit is 1e-5; 1e-7 is the last bit of fp32. Models are small. Ours are named after what is special
about them (`tied`: the embedding is also the head; `experts`: a mixture of experts; `latent`: DeepSeek's attention;
`windows`: sliding-window attention), those of Hugging Face after their family."""


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
    parts += [record["note"]] if "note" in record else []
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
        parts.append(_of_others(record["others"], shares_processes=record.get("shares_processes", False)))
    return "\n\n".join(parts) + "\n"


_BF16 = """\
## The same in bf16

A plan in bf16 should be as close to fp32 as one device in bf16 is. Errors are relative to fp32 on one device: the root
mean square over all tensors (for losses and norms, over the steps). The first number is that of the plan; the number
after the slash is that of one device in bf16. A plan passes if

- its mean error is at most twice that of one device;
- no tensor's error is more than four times that of the same tensor, or of the mean tensor, on one device;
- errors of losses and norms are at most twice those of one device, or 2^-9 (`parity/rounding.py`)."""


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
        "## Models of Hugging Face\n\nOne small, unmodified model of each family, and the error of its gradients: in"
        " fp32 the error of the worst tensor; in bf16 the mean error, and after the slash that of one device."
        f" {passed} of {len(rows)} passed."
    )
    return "\n\n".join([intro, "\n".join([head, rule, *lines])])


def _of_faults(rows: list[dict[str, Any]]) -> str:
    """What happened to which rank, and how soon it was named."""
    head = "| started by | plan | fault | rank | named after | message |\n|---|---|---|---|---|---|"
    lines = []
    for row in rows:
        took = "never" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        said = (row["problem"] or row["sentence"]).partition("\n")[0].replace("|", "\\|")
        said = "; ".join([said, *([row["since"]] if "since" in row else [])])
        lines.append(f"| {row['how']} | `{row['plan']}` | {row['fault']} | {row['rank']} | {took} | {said} |")
    intro = (
        "## Ranks that are lost\n\nA rank is killed (SIGKILL), stopped (SIGSTOP), raises, is late (sleeps during a"
        ' step) or is absent (does not take part in a step). "Named after" is the time until the process that'
        " started the ranks reports the fault. To save time, most runs have a limit of 4 s instead of 20."
    )
    return "\n\n".join([intro, f"{head}\n" + "\n".join(lines)])


_PARTS = {"nccl": "NCCL programs", "input": "bad input", "commands": "commands", "pytest": "tests"}


def _of_others(rows: list[dict[str, Any]], *, shares_processes: bool) -> str:
    """What ends with a status, and how long it took."""
    head = "| part | cases | result | duration |\n|---|---|---|---|"
    lines = []
    for row in rows:
        which = f"`{row['name']}`" if row["part"] == "pytest" else "all"
        # pytest ends with 5 where it finds nothing to run.
        result = {0: "passed", 5: "nothing to run"}.get(row["status"], f"failed with status {row['status']}")
        told = "; ".join([result, *([row["since"]] if "since" in row else [])])
        lines.append(f"| {_PARTS[row['part']]} | {which} | {told} | {row['seconds']:.0f} s |")
    intro = (
        "Short test files share a process: their duration is without its start. That of commands is the sum over"
        " all of them; several run at a time."
    )
    # Earlier runs started each file by itself, and took the time of all commands together.
    intros = [intro] if shares_processes else []
    return "\n\n".join(["## What else was run", *intros, f"{head}\n" + "\n".join(lines)])


def _line(row: dict[str, Any]) -> str:
    errors = [f"{error:.1e}" for error in row["errors"].values()]
    told = errors if row["problem"] is None else [row["problem"], "", "", ""]
    return f"| `{row['plan']}` | {row['model']} | {' | '.join(told)} |"
