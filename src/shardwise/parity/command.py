"""`shardwise check`: compare a plan with one device, on this machine."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.units import counted, format_seconds

if TYPE_CHECKING:
    from shardwise.parity.compare import Difference
    from shardwise.parity.problem import MakeProblem
    from shardwise.parity.verdict import Verdict

DESCRIPTION = """
Train a few steps under a plan, with one process per rank on this machine, and
the same steps with plain torch on one device. Compare the loss, every
gradient, the gradient norm, the weights and an evaluation.

Between steps the state is saved and loaded into a new engine, at the end under
another plan. A few steps in bf16 follow, or in fp8 if the plan has
precision=fp8.

The model is a small transformer with the layers that the plan needs, a known
model scaled down (--model), or your own with its loss and optimizer (--module).
--device cuda runs on GPUs over NCCL; ranks share them if there are too few.
--inject breaks the run on purpose, to show that the check notices.

With --nccl nothing is compared. Instead the NCCL calls of all ranks are
recorded, on the CPU or on GPUs. They are proven to match, to be free of
deadlock, and to use no memory too early.
"""

EXAMPLE = """
shardwise check --plan tp=2 --model gpt2
"""

_FAULTS = "unscaled-gradients, missing-reduction, swapped-shard, unmasked-padding, stale-gather"
_NUM_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", required=True, metavar="P", help="a plan such as dp=2,tp=2,zero=1, or a plan.toml")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="scale down a known model, such as llama3.1-8b")
    which.add_argument(
        "--module",
        metavar="PKG.MOD:FACTORY",
        help="function that returns a module, a batch, a loss and how to train it; or FILE.py:FACTORY",
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="number of steps (default: 8)")
    parser.add_argument("--no-bf16", action="store_true", help="skip the steps in bf16")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks compute; they may share GPUs (default: cpu)",
    )
    parser.add_argument("--inject", metavar="FAULT", help=f"break the run on purpose: {_FAULTS}")
    parser.add_argument("--nccl", action="store_true", help="prove that NCCL calls of all ranks match; needs no GPU")


def run(arguments: argparse.Namespace) -> Answer:
    from shardwise.parity.check import check  # Loads torch, which --help does not need.
    from shardwise.parity.given import problem_from
    from shardwise.parity.models import default_settings, describe, named_settings, problem_of

    plan, steps = _read_plan(arguments.plan), arguments.steps
    if steps < 1:
        raise ShardwiseError(f"--steps {steps}: at least 1 is needed", remedy="--steps 8")
    _check_device(arguments.device, plan)
    if arguments.nccl and arguments.inject is not None:
        raise ShardwiseError(
            f"--inject {arguments.inject} makes numbers wrong, and --nccl looks at none",
            remedy=f"--inject {arguments.inject} without --nccl",
        )
    start = perf_counter()
    if arguments.module is not None:
        make, vocabulary, what = problem_from(arguments.module, steps), None, arguments.module
    else:
        settings = default_settings(plan) if arguments.model is None else named_settings(arguments.model, plan)
        if plan.ep > 1 and settings.mixture is None:
            raise ShardwiseError(
                f"{arguments.model} has no experts for ep={plan.ep} to distribute",
                remedy=f"--plan {replace(plan, ep=1)}",
            )
        make, vocabulary = problem_of(settings, plan, steps), settings.vocabulary
        what = f"{arguments.model or 'a small transformer'}: {describe(settings)}"
    if arguments.nccl:
        return _prove(plan, make, what, arguments, start)
    verdict = check(
        plan, make, fault=arguments.inject, vocabulary=vocabulary, device=arguments.device, bf16=not arguments.no_bf16
    )
    data = _data(verdict, what, arguments.inject, steps, perf_counter() - start)
    data["device"], data["devices"] = arguments.device, _num_devices(arguments.device, plan)
    return Answer(data=data, render=lambda canvas: _draw(data, canvas), status=0 if verdict.is_same else 1)


def _prove(plan: Plan, make: "MakeProblem", what: str, arguments: argparse.Namespace, start: float) -> Answer:
    """Check the NCCL calls of all ranks."""
    from shardwise.parity.programs import check_programs

    proof = check_programs(plan, make, device=arguments.device)
    data = {"ok": proof.is_right, **asdict(proof), "plan": str(plan), "model": what, "steps": arguments.steps}
    data["device"], data["seconds"] = arguments.device, round(perf_counter() - start, 1)
    return Answer(data=data, render=lambda canvas: _draw_proof(data, canvas), status=0 if proof.is_right else 1)


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
    comparison, first, halves = verdict.comparison, verdict.comparison.first, verdict.halves
    return {
        "ok": verdict.is_same,
        "max_relative_error": {
            "loss": _finite(comparison.worst("loss")),
            "gradient": _finite(comparison.worst("gradient")),
            "norm": _finite(comparison.worst("norm")),
            "weight": _finite(comparison.worst("weight", "used weight")),
            "evaluation": _finite(comparison.worst("evaluation")),
        },
        "bf16": None if isinstance(halves, str) else {key: _all_finite(each) for key, each in asdict(halves).items()},
        "by_microbatches": verdict.by_microbatches,
        "covered": list(verdict.coverage.covered),
        "left_out": list(verdict.coverage.left_out),
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


def _all_finite(found: Any) -> Any:
    return {kind: _finite(each) for kind, each in found.items()} if isinstance(found, dict) else found


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
    _draw_coverage(data, canvas)
    took = f"in {format_seconds(data['seconds'])}"
    if data["ok"]:
        canvas.print(canvas.paint(f"the same as on one device, {took}", "green"))
        return
    canvas.print(canvas.paint(f"not the same as on one device, {took}", "bold red"))
    if data["first_difference"] is None:
        rounding = data["bf16"]
        canvas.print(f"in {rounding['precision']}: {rounding['problem']}, against {rounding['against']}")
        return
    _draw_first(data["first_difference"], canvas)
    if data["by_microbatches"] is not None:
        canvas.print(f"{data['by_microbatches']}. Ranks train what one device trains on these parts")
        canvas.print("  try: a loss that returns the sum and what it is summed over: return total, count")


def _draw_coverage(data: Mapping[str, Any], canvas: Canvas) -> None:
    canvas.print()
    for word, sentences in (("covered", data["covered"]), ("not covered", data["left_out"])):
        canvas.print(f"{word}:")
        for each in sentences:
            canvas.print(f"  {each}")
    canvas.print()


def _draw_first(first: Mapping[str, Any], canvas: Canvas) -> None:
    is_number = first["kind"] in ("loss", "norm", "evaluation")
    thing = f"the {first['kind']}" if is_number else f"the {first['kind']} of {first['tensor']}"
    canvas.print(
        f"first to differ: {thing} in step {first['step']} on rank {first['rank']}, off by {_shown(first['error'])}"
    )
    if is_number and first["tensor"] is not None:
        canvas.print(f"first tensor to show it: {first['tensor']}")
    for owner in first["owners"]:
        canvas.print(f"  {owner}")


def _draw_proof(data: Mapping[str, Any], canvas: Canvas) -> None:
    canvas.print(f"{data['plan']} on {counted(data['ranks'], 'rank')}, {counted(data['steps'], 'step')}")
    canvas.print(f"{data['model']}; the NCCL operations of its ranks, recorded on {data['device']}")
    canvas.print()
    canvas.print(
        f"{counted(data['operations'], 'operation')} on {counted(data['communicators'], 'communicator')} and"
        f" {counted(data['streams'], 'stream')}, at most {data['most_under_way']} under way on a rank;"
        f" {counted(data['waits'], 'wait')}, {counted(data['touches'], 'use')} of memory"
    )
    took = f"in {format_seconds(data['seconds'])}"
    if data["ok"]:
        canvas.print(
            canvas.paint(
                f"all ranks issue the same operations, none can deadlock, and no memory is used early, {took}", "green"
            )
        )
        return
    canvas.print(canvas.paint(f"{counted(len(data['problems']), 'problem')}, {took}", "bold red"))
    for each in data["problems"][:_NUM_SHOWN]:
        canvas.print(each["sentence"])
        canvas.print(f"  look at: {each['look']}")


def _cells(row: Mapping[str, Any]) -> list[object]:
    times = "-" if row["times"] is None else f"{row['times']:.4g}"
    return [row["tensor"], row["kind"], row["step"], row["rank"], _shown(row["error"]), times]


def _shown(error: float | None) -> str:
    return "not a number" if error is None else "0" if error == 0 else f"{error:.1e}"
