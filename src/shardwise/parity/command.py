"""`shardwise check`: a plan against one device, on this machine."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.units import counted, format_seconds

if TYPE_CHECKING:
    from shardwise.parity.check import Verdict
    from shardwise.parity.compare import Difference

DESCRIPTION = """Train a few steps under a plan, every rank a process on this machine, and the same steps on one
device; compare the loss, every gradient, their norm and the next weights, by the names of the module. Ranks compute on
the CPU, or (--device cuda) on the GPUs that there are, over NCCL, sharing them where they are fewer than ranks. The
model is small: one that has what the plan needs, a known one (--model) made small with its structure kept, or your own
(--module). --inject breaks the run on purpose, to see that it is noticed.
"""

EXAMPLE = """
shardwise check --plan tp=2 --model gpt2
"""

_FAULTS = "unscaled-gradients, missing-reduction, swapped-shard, unmasked-padding, stale-gather"
_NUM_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", required=True, metavar="P", help="dp=2,tp=2,zero=1, or the path of a plan.toml")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="a known model made small, such as llama3.1-8b")
    which.add_argument(
        "--module", metavar="PKG.MOD:FACTORY", help="a function that returns a module, a batch and a loss"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="how many steps to train (3)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what ranks compute on (cpu); they share GPUs"
    )
    parser.add_argument("--inject", metavar="FAULT", help=f"break the run on purpose: {_FAULTS}")


def run(arguments: argparse.Namespace) -> Answer:
    from shardwise.parity.check import check  # Loads torch, which --help does not need.
    from shardwise.parity.given import problem_from
    from shardwise.parity.models import default_settings, describe, named_settings, problem_of

    plan, steps = _read_plan(arguments.plan), arguments.steps
    if steps < 1:
        raise ShardwiseError(f"--steps {steps}: at least 1 is needed", remedy="--steps 3")
    _check_device(arguments.device, plan)
    start = perf_counter()
    if arguments.module is not None:
        make, vocabulary, what = problem_from(arguments.module, steps), None, arguments.module
    else:
        settings = default_settings(plan) if arguments.model is None else named_settings(arguments.model, plan)
        if plan.ep > 1 and settings.mixture is None:
            raise ShardwiseError(
                f"{arguments.model} has no experts for ep={plan.ep} to share out",
                remedy=f"--plan {replace(plan, ep=1)}",
            )
        make, vocabulary = problem_of(settings, plan, steps), settings.vocabulary
        what = f"{arguments.model or 'a small transformer'}: {describe(settings)}"
    verdict = check(plan, make, fault=arguments.inject, vocabulary=vocabulary, device=arguments.device)
    data = _data(verdict, what, arguments.inject, steps, perf_counter() - start)
    data["device"], data["devices"] = arguments.device, _num_devices(arguments.device, plan)
    return Answer(data=data, render=lambda canvas: _draw(data, canvas), status=0 if verdict.comparison.is_same else 1)


def _check_device(device: str, plan: Plan) -> None:
    from shardwise.ranks.gpus import check_any, find_gpus

    if device == "cuda":
        check_any(find_gpus(), "--device cuda", f"--device cpu --plan {plan}")


def _num_devices(device: str, plan: Plan) -> int:
    import torch

    return min(plan.num_ranks, torch.cuda.device_count()) if device == "cuda" else plan.num_ranks


def _read_plan(text: str) -> Plan:
    is_path = text.endswith(".toml") or (text and "=" not in text and Path(text).exists())
    return Plan.load(Path(text)) if is_path else Plan.parse(text)


def _data(verdict: "Verdict", what: str, fault: str | None, steps: int, seconds: float) -> dict[str, Any]:
    comparison, first = verdict.comparison, verdict.comparison.first
    return {
        "ok": comparison.is_same,
        "max_relative_error": {
            "loss": _finite(comparison.worst("loss")),
            "gradient": _finite(comparison.worst("gradient")),
            "norm": _finite(comparison.worst("norm")),
            "weight": _finite(comparison.worst("weight", "used weight")),
        },
        "first_difference": None if first is None else {**_row(first), "owners": list(verdict.owners)},
        "worst": [_row(each) for each in comparison.worst_tensors(_NUM_SHOWN)],
        "limit": comparison.limit,
        "plan": str(verdict.plan),
        "ranks": verdict.plan.num_ranks,
        "model": what,
        "parameters": verdict.num_parameters,
        "steps": steps,
        "injected": fault,
        "seconds": round(seconds, 1),
    }


def _row(difference: "Difference") -> dict[str, Any]:
    return {
        "tensor": difference.name,
        "kind": difference.kind,
        "step": difference.step,
        "rank": difference.rank,
        "error": _finite(difference.error),
        "times": _finite(difference.times),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _draw(data: Mapping[str, Any], canvas: Canvas) -> None:
    canvas.print(f"{data['plan']} on {counted(data['ranks'], 'rank')}, {counted(data['steps'], 'step')}")
    if data["devices"] < data["ranks"]:
        shared = f"{counted(data['ranks'], 'rank')} share {counted(data['devices'], 'GPU')}, over NCCL's sockets"
        canvas.print(canvas.paint(f"{shared}: that is for checking, and says nothing of speed", "yellow"))
    canvas.print(f"{data['model']} ({data['parameters']:,} parameters)")
    if data["injected"]:
        canvas.print(canvas.paint(f"injected: {data['injected']}", "yellow"))
    canvas.print()
    columns = ["tensor", "off in", "step", "rank", "error", "times as large"]
    table(columns, [_cells(row) for row in data["worst"]], canvas)
    canvas.print()
    errors = ", ".join(f"{kind} {_shown(error)}" for kind, error in data["max_relative_error"].items())
    canvas.print(f"largest relative errors: {errors} (limit {data['limit']:.0e})")
    first = data["first_difference"]
    took = f"in {format_seconds(data['seconds'])}"
    if first is None:
        canvas.print(canvas.paint(f"the same as on one device, {took}", "green"))
        return
    canvas.print(canvas.paint(f"not the same as on one device, {took}", "bold red"))
    thing = f"the {first['kind']}" if first["kind"] in ("loss", "norm") else f"the {first['kind']} of {first['tensor']}"
    canvas.print(
        f"first to differ: {thing} in step {first['step']} on rank {first['rank']}, off by {_shown(first['error'])}"
    )
    if first["kind"] in ("loss", "norm") and first["tensor"] is not None:
        canvas.print(f"first tensor to show it: {first['tensor']}")
    for owner in first["owners"]:
        canvas.print(f"  {owner}")


def _cells(row: Mapping[str, Any]) -> list[object]:
    times = "-" if row["times"] is None else f"{row['times']:.4g}"
    return [row["tensor"], row["kind"], row["step"], row["rank"], _shown(row["error"]), times]


def _shown(error: float | None) -> str:
    return "not a number" if error is None else "0" if error == 0 else f"{error:.1e}"
