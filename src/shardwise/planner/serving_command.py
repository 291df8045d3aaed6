"""`shardwise plan --task serve`: find a way to serve a model, and show it."""

import argparse
from collections.abc import Sequence

from shardwise.answer import Answer, Canvas, table
from shardwise.cost.serving import BLOCK, WEIGHT_BYTES
from shardwise.errors import ShardwiseError, unknown
from shardwise.planner.plan import read_keys
from shardwise.planner.programs.vllm import write
from shardwise.planner.question import make_question
from shardwise.planner.serving import Serving, ServingFindings, Target, find_serving
from shardwise.units import counted, format_bytes, format_percent, format_seconds, parse_seconds

_GOALS = ("tokens", "latency")
_FIXABLE = ("dp", "tp", "pp", "ep")


def answer(arguments: argparse.Namespace) -> Answer:
    """Find the best way to serve."""
    goal = arguments.goal or "tokens"
    if goal not in _GOALS:
        error = unknown("goal of serving", goal, _GOALS)
        raise ShardwiseError(error.problem, remedy=f"--goal {error.remedy or 'tokens'}")
    if arguments.weights is not None:
        _check_weights(arguments)
    target = Target(
        output=arguments.output,
        goal=goal,
        first_token=None if arguments.first_token is None else parse_seconds(arguments.first_token),
        each_token=None if arguments.each_token is None else parse_seconds(arguments.each_token),
        sequences=arguments.batch,
        experts_over_all=arguments.program == "vllm",
        weights=arguments.weights,
    )
    fixed = {} if arguments.fix is None else read_keys(arguments.fix)
    for key in fixed:
        if key not in _FIXABLE:
            raise ShardwiseError(
                f"{key} is for training: of a way to serve, {', '.join(_FIXABLE)} can be decided", remedy="--fix tp=8"
            )
    question = make_question(
        arguments.model,
        cluster=arguments.cluster,
        batch=1 if arguments.batch is None else arguments.batch,
        sequence=arguments.sequence,
        fixed=fixed,
    )
    if arguments.program not in (None, "vllm"):
        raise ShardwiseError(f"{arguments.program} trains and does not serve", remedy="--task serve --for vllm")
    found = find_serving(question, target)
    command = None
    if arguments.program == "vllm":
        command = write(found.best, arguments.model, longest=question.sequence + target.output)
    if arguments.save is not None:
        found.best.plan.save(arguments.save)
    data = {
        "model": question.model.name,
        "cluster": str(question.cluster),
        "prompt": question.sequence,
        "output": target.output,
        "weights": target.weights,
        **_data(found.best),
        "reasons": list(found.reasons),
        "fastest": None if found.fastest is None else _data(found.fastest),
        "others": [_data(each) for each in found.others],
        "candidates": {"considered": found.num_candidates, "fitting": found.num_fitting},
        "saved": arguments.save,
        **({} if command is None else {"program": "vllm", "text": command}),
    }

    def render(canvas: Canvas) -> None:
        _draw(found, canvas)
        if command is not None:
            canvas.print(f"\n{command}")

    return Answer(data=data, render=render)


def _check_weights(arguments: argparse.Namespace) -> None:
    if arguments.weights not in WEIGHT_BYTES:
        error = unknown("kind of weights", arguments.weights, tuple(WEIGHT_BYTES))
        raise ShardwiseError(error.problem, remedy=f"--weights {error.remedy or 'fp8'}")
    if arguments.program is not None:
        raise ShardwiseError(
            f"--weights is priced as our own engine serves, and what --for {arguments.program} writes is in bf16",
            remedy="--weights without --for, or --for without --weights",
        )


def _data(way: Serving) -> dict[str, object]:
    return {
        "plan": str(way.plan),
        "sequences": way.sequences,
        "first_token_seconds": way.first_token,
        "each_token_seconds": way.each_token,
        "mean_token_seconds": way.mean_token,
        "tokens_per_second": way.tokens_per_second,
        "kv_blocks": way.num_blocks,
        "kv_block_bytes": round(way.block_bytes),
        "kv_blocks_used": way.used_blocks,
        "weight_bytes": round(way.weight_bytes),
    }


def _draw(found: ServingFindings, canvas: Canvas) -> None:
    question, best = found.question, found.best
    canvas.print(
        f"{canvas.paint(question.model.name, 'bold')} served on {question.cluster}: prompts of {question.sequence} "
        f"tokens, answers of {found.target.output}"
    )
    canvas.print()
    canvas.print(
        f"  plan     {canvas.paint(str(best.plan), 'bold green')}, {counted(best.sequences, 'sequence')} at once in "
        f"each replica{'' if found.target.weights is None else f', layers in {found.target.weights}'}"
    )
    canvas.print(
        f"  answers  {best.tokens_per_second:,.0f} tokens/s in all; the first token after "
        f"{format_seconds(best.first_token)}, then one every {format_seconds(best.each_token)}{_between(best)}"
    )
    canvas.print(
        f"  memory   {format_bytes(best.weight_bytes)} of weights on a device, and {best.num_blocks:,} KV blocks of "
        f"{BLOCK} tokens ({format_bytes(best.num_blocks * best.block_bytes)}), {best.used_blocks:,} of them in use"
    )
    canvas.print()
    _draw_reasons(found, canvas)
    _draw_others(found.others, canvas)
    canvas.print(canvas.paint(f"{found.num_candidates:,} candidates, {found.num_fitting:,} fit.", "dim"))


def _between(way: Serving) -> str:
    """Describe the effect of other requests' prompts on the time between two tokens, if it is large."""
    if way.mean_token < 1.05 * way.each_token:
        return ""
    return f", or {format_seconds(way.mean_token)} on average with the prompts of others read in between"


def _draw_reasons(found: ServingFindings, canvas: Canvas) -> None:
    if found.reasons:
        canvas.print(canvas.paint("why", "bold"))
        for reason in found.reasons:
            canvas.print(f"  {reason}")
        canvas.print()
    if found.fastest is not None:
        way, best = found.fastest, found.best
        more = way.tokens_per_second / best.tokens_per_second - 1.0
        sooner = 1.0 - way.each_token / best.each_token
        gains = {"tokens": f"{format_percent(more)} more tokens", "latency": f"{format_percent(sooner)} sooner"}
        canvas.print(
            f"{way.plan} is predicted to answer {gains[found.target.goal]}, which is too little for another axis."
        )
        canvas.print()


def _draw_others(others: Sequence[Serving], canvas: Canvas) -> None:
    if not others:
        return
    canvas.print(canvas.paint("other splits", "bold"))
    rows = [
        [f"  {way.plan}", way.sequences, f"{way.tokens_per_second:,.0f}", format_seconds(way.first_token),
         format_seconds(way.each_token)]
        for way in others
    ]  # fmt: skip
    table(["  plan", "sequences", "tokens/s", "first token", "each token"], rows, canvas)
    canvas.print()
