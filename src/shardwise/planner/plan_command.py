"""`shardwise plan`: find the best plan for a model on a cluster, with its reasons."""

import argparse
from pathlib import Path
from typing import Any

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, unknown
from shardwise.output import check_output
from shardwise.planner.plan import read_keys
from shardwise.units import parse_seconds
from shardwise.working import working_at

DESCRIPTION = """
Find the plan that trains a model fastest on a cluster. The search covers all
axes, schedules, microbatches, ZeRO stages and recomputation together.

Prints the step time with an interval that holds nine of ten such steps, the
memory of each stage, a reason for each choice, and what the best plans of
other kinds would gain or lose.

With --task serve, find the split, the batch and the number of KV blocks for
the highest throughput or the lowest latency.
"""

EXAMPLE = """
shardwise plan llama3-8b --cluster 8xh100 --batch 64 --sequence 4096
shardwise plan llama3-8b --cluster 2x8xa100 --batch 64 --sequence 4096 --fix tp=2 --save plan.toml
shardwise plan llama3-8b --cluster 4x8xh100 --batch 64 --sequence 4096 --goal fewest --target 4s
shardwise plan llama3-8b --cluster 8xh100 --batch 64 --sequence 4096 --for megatron
shardwise plan llama3-70b --cluster 8xh100 --batch 64 --sequence 4096 --lora 16
shardwise plan llama3-8b --cluster 8xh100 --sequence 1024 --output 256 --task serve
"""

_TASKS = ("train", "serve")
_GOALS = ("fastest", "fewest", "cheapest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a known model, a config.json, or package.module:factory")
    parser.add_argument("--lora", metavar="R", type=int, help="train only LoRA adapters of this rank")
    parser.add_argument("--cluster", metavar="C", required=True, help="8xh100, 64x8xh100, 2xcpu, or a cluster.toml")
    parser.add_argument("--batch", metavar="N", type=int, help="samples per step; serving: most sequences at once")
    parser.add_argument("--sequence", metavar="S", type=int, help="tokens per sample; serving: per prompt")
    parser.add_argument("--task", metavar="T", default="train", help="train or serve (default: train)")
    parser.add_argument(
        "--goal", metavar="G",
        help="train: fastest (default), fewest devices for --target, or cheapest for --prices; "
        "serve: tokens (throughput, default) or latency",
    )  # fmt: skip
    parser.add_argument("--target", metavar="T", help="longest step time allowed, such as 2.5s")
    parser.add_argument("--prices", metavar="P", help="price of a device-hour: h100=2.5,a100-80g=1.2")
    parser.add_argument("--fix", metavar="KEYS", help="fix these keys of the plan: tp=8,zero=1")
    parser.add_argument("--any-engine", action="store_true", help="include plans that our engine does not run yet")
    parser.add_argument(
        "--output", metavar="N", type=int, default=256, help="serving: tokens per answer (default: 256)"
    )
    parser.add_argument("--weights", metavar="W", help="serving: type of layer weights, fp8 or int4 (default: bf16)")
    parser.add_argument("--first-token", metavar="T", help="serving: longest time to the first token, such as 500ms")
    parser.add_argument("--each-token", metavar="T", help="serving: longest time per further token, such as 30ms")
    parser.add_argument(
        "--for", dest="program", metavar="P",
        help="print the best plan for another program, as its arguments or file: megatron, torchtitan, deepspeed, "
        "accelerate; serving: vllm",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE", help="write the plan to this file, with its reasons")


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.task not in _TASKS:
        error = unknown("task", arguments.task, _TASKS)
        raise ShardwiseError(error.problem, remedy=f"--task {error.remedy or 'train'}")
    if arguments.save is not None:
        check_output(Path(arguments.save), remedy="--save plan.toml")
    if arguments.program == "vllm" and arguments.task != "serve":
        raise ShardwiseError("vLLM serves and does not train", remedy="--task serve --for vllm")
    if arguments.task == "train" and arguments.weights is not None:
        raise ShardwiseError(
            f"--weights {arguments.weights} is for serving, and the task is to train",
            remedy="--task serve, or --fix precision=fp8",
        )
    if arguments.task == "serve":
        if arguments.lora is not None:
            raise ShardwiseError("--lora is for training, and the task is to serve", remedy="--task train")
        from shardwise.planner.serving_command import answer

        return answer(arguments)
    return _train(arguments)


def _train(arguments: argparse.Namespace) -> Answer:
    # These load numpy, which --help does not need.
    from shardwise.planner.drawing import account_data, draw_findings, draw_pool, tally_data
    from shardwise.planner.goals import faster_pool
    from shardwise.planner.question import make_question

    if arguments.lora is not None and arguments.program is not None:
        raise ShardwiseError(
            f"what --for {arguments.program} writes would train all weights: adapters are not among its arguments",
            remedy="--lora without --for, or --for without --lora",
        )
    if arguments.batch is None:
        raise ShardwiseError("the batch size, in samples per step, is not given", remedy="--batch 256")
    question = make_question(
        arguments.model,
        cluster=arguments.cluster,
        batch=arguments.batch,
        sequence=arguments.sequence,
        fixed={} if arguments.fix is None else read_keys(arguments.fix),
        runnable=not arguments.any_engine,
        lora=arguments.lora,
    )
    working_at("the search for the best plan")
    if arguments.program is not None:
        from shardwise.planner.programs.answers import plan_answer

        return plan_answer(arguments, question)
    found, price = _find(arguments, question)
    alone = faster_pool(found.question, found.best.seconds)
    saved = arguments.save
    if saved is not None:
        found.plan.save(Path(saved))
    data = {
        "model": question.model.name,
        "cluster": str(found.question.cluster),
        "batch": question.batch,
        "sequence": question.sequence,
        **account_data(found.best),
        "fastest": None if found.fastest is None else account_data(found.fastest),
        "others": [account_data(each) for each in found.others],
        "faster_pool": None if alone is None else {"cluster": str(alone.question.cluster), **account_data(alone.best)},
        "candidates": tally_data(found.tally),
        "price_of_step": price,
        "saved": saved,
    }

    def render(canvas: Canvas) -> None:
        draw_findings(found, canvas)
        if alone is not None:
            draw_pool(found.best, alone.best, canvas)
        if price is not None:
            million = 1e6 * price / (question.batch * question.sequence)
            canvas.print(f"\na step costs {price:.3g}, and a million tokens {million:.3g}, in the currency of --prices")
        if saved is not None:
            canvas.print(f"\nsaved in {saved}")

    return Answer(data=data, render=render)


def _find(arguments: argparse.Namespace, question: Any) -> tuple[Any, float | None]:
    """Return the plan for the goal, and the price of its step if prices are known."""
    from shardwise.planner.goals import cheapest, fewest_devices
    from shardwise.planner.search.findings import find_plan

    goal = arguments.goal or "fastest"
    if goal not in _GOALS:
        error = unknown("goal of training", goal, _GOALS)
        raise ShardwiseError(error.problem, remedy=f"--goal {error.remedy or 'fastest'}")
    target = None if arguments.target is None else parse_seconds(arguments.target)
    if target is not None and goal == "fastest":
        raise ShardwiseError(
            "--target is a limit for the fewest or the cheapest devices, and the goal is the fastest step",
            remedy=f"--goal fewest --target {arguments.target}",
        )
    if goal == "fewest":
        if target is None:
            raise ShardwiseError("--goal fewest needs a limit on the step time", remedy="--target 5s")
        return fewest_devices(question, target), None
    if goal == "cheapest":
        priced = cheapest(question, _prices(arguments.prices), target)
        return priced.findings, priced.price_of_step
    return find_plan(question), None


def _prices(text: str | None) -> dict[str, float]:
    from shardwise.cluster.catalogue import get_device

    if text is None:
        raise ShardwiseError("the price of a device-hour is not given", remedy="--prices h100=2.50")
    prices = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        device = get_device(name).name
        try:
            prices[device] = float(price)
        except ValueError:
            prices[device] = -1.0
        if prices[device] < 0:
            raise ShardwiseError(f"{part!r} is no price of a device", remedy="--prices h100=2.50")
    return prices
