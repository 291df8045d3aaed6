"""`shardwise fit`: check whether a plan fits, rank by rank, and predict the time of its step."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.units import format_bytes
from shardwise.working import working_at

if TYPE_CHECKING:
    from shardwise.planner.account import Account
    from shardwise.planner.changes import Change
    from shardwise.planner.placement.seats import Seats

DESCRIPTION = """
Predict the memory of every rank under a plan, what is left, and the step time
with an interval that holds nine of ten such steps.

If the plan does not fit, name the three changes that make it fit at the least
cost in time, and exit with status 1.
"""

EXAMPLE = """
shardwise fit llama3-8b --cluster 8xh100 --plan dp=4,tp=2,zero=1,microbatches=4,precision=bf16 --sequence 8192
shardwise fit llama3-8b --cluster 8xh100 --plan pp=8,microbatches=16,schedule=zb-v,precision=bf16 --batch 32
shardwise fit llama3-8b --cluster 1xrtx4090 --plan recompute=full,microbatches=8 --batch 8 --sequence 2048 --lora 16
"""

_USUAL_SEQUENCE = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a known model, a config.json, or package.module:factory")
    parser.add_argument("--lora", metavar="R", type=int, help="train only LoRA adapters of this rank")
    parser.add_argument("--cluster", metavar="C", required=True, help="8xh100, 64x8xh100, 2xcpu, or a cluster.toml")
    parser.add_argument("--plan", metavar="P", help="a plan such as dp=4,tp=2,zero=1, or a plan.toml")
    parser.add_argument(
        "--from", dest="source", metavar="F",
        help="read another program's configuration instead of a plan: quoted arguments of Megatron-LM or vLLM, "
        "torchtitan.toml, ds_config.json, or Accelerate's YAML",
    )  # fmt: skip
    parser.add_argument("--batch", metavar="N", type=int, help="samples per step (default: one per microbatch)")
    parser.add_argument(
        "--sequence",
        metavar="S",
        type=int,
        help=f"tokens per sample (default: {_USUAL_SEQUENCE}, or less if the model takes less)",
    )
    parser.add_argument(
        "--placement",
        action="store_true",
        help="draw which rank is on which device, and the bytes on each link",
    )


def run(arguments: argparse.Namespace) -> Answer:
    # These load numpy, which --help does not need; further imports below are for some answers only.
    from shardwise.planner.account import account, typed
    from shardwise.planner.composition import composes, nearest_plan
    from shardwise.planner.drawing import account_data
    from shardwise.planner.question import make_question

    if (arguments.plan is None) == (arguments.source is None):
        given = "neither --plan nor --from is" if arguments.plan is None else "both --plan and --from are"
        raise ShardwiseError(
            f"{given} given, and one of them has the plan to check",
            remedy="--plan dp=8,zero=1, or --from ds_config.json",
        )
    if arguments.source is not None:
        from shardwise.planner.programs.answers import fit_answer

        return fit_answer(arguments, usual_sequence=_USUAL_SEQUENCE, draw=_draw)
    plan = Plan.load(Path(arguments.plan)) if arguments.plan.endswith(".toml") else Plan.parse(arguments.plan)
    question = make_question(
        arguments.model,
        cluster=arguments.cluster,
        batch=plan.dp * plan.microbatches if arguments.batch is None else arguments.batch,
        sequence=arguments.sequence,
        usual_sequence=_USUAL_SEQUENCE,
        lora=arguments.lora,
    )
    if not _says_precision(arguments.plan):
        plan = replace(plan, precision=question.precisions[0])  # The usual one on GPUs; the printed plan names it.
    working_at("the account of every rank")
    found = account(question, plan)
    changes = () if found.fits else _changes(found)
    runs = composes(plan)
    seats: Seats | None = None
    if arguments.placement:
        from shardwise.planner.placement.seats import seats_for

        seats = seats_for(question, plan)
    data = {
        "model": question.model.name,
        "cluster": str(question.cluster),
        "batch": question.batch,
        "sequence": question.sequence,
        **account_data(found),
        "runs": runs,
        "changes": [
            {"change": change.words, "slower": change.slower, **account_data(change.account)} for change in changes
        ],
        **({} if seats is None else _seats_data(seats)),
    }

    def render(canvas: Canvas) -> None:
        _draw(found, changes, canvas)
        if seats is not None:
            from shardwise.planner.placement.drawing import draw_seats

            canvas.print()
            draw_seats(seats, canvas)
        if not runs:
            nearest = typed(question, nearest_plan(plan))
            canvas.print(f"\nThe engines do not run this plan yet. The nearest that they do: {nearest}")

    return Answer(data=data, render=render, status=0 if found.fits else 1)


def _changes(found: "Account") -> "tuple[Change, ...]":
    from shardwise.planner.changes import cheapest_changes

    working_at("what would make it fit")
    return cheapest_changes(found)


def _seats_data(seats: "Seats") -> dict[str, object]:
    from shardwise.planner.placement.drawing import seats_data

    return {"placement": seats_data(seats)}


def _says_precision(given: str) -> bool:
    """Whether a plan, in short or in a file, names its precision."""
    text = Path(given).read_text(encoding="utf-8") if given.endswith(".toml") else given
    return re.search(r"\bprecision\s*=", text) is not None


def _draw(found: "Account", changes: "tuple[Change, ...]", canvas: Canvas) -> None:
    from shardwise.planner.drawing import draw_head, draw_memory, draw_seconds

    for part in (draw_head, _draw_ranks, draw_memory, draw_seconds):
        part(found, canvas)
        canvas.print()
    if found.fits:
        left = f"{format_bytes(found.fullest.headroom)} left on its fullest rank"
        canvas.print(f"{canvas.paint('It fits', 'bold green')}, with {left}.")
        return
    _draw_changes(found, changes, canvas)


def _draw_ranks(found: "Account", canvas: Canvas) -> None:
    """Draw the memory of ranks, one line per stage: its replicas hold the same."""
    from shardwise.planner.drawing import GROUPS, in_groups

    names = [name for name, *_ in GROUPS]
    rows = []
    for rank in found.ranks:
        groups = in_groups(rank.parts)
        left = format_bytes(rank.headroom) if rank.headroom >= 0 else f"-{format_bytes(-rank.headroom)}"
        rows.append(
            [f"  {rank.place}", rank.num_ranks, *(format_bytes(groups[name]) for name in names),
             format_bytes(rank.total), left]
        )  # fmt: skip
    table(["  stage", "ranks", *names, "in all", "left"], rows, canvas)


def _draw_changes(found: "Account", changes: "tuple[Change, ...]", canvas: Canvas) -> None:
    fullest = found.fullest
    if fullest.headroom < 0:
        canvas.print(
            f"{canvas.paint('It does not fit', 'bold red')}: stage {fullest.place} needs {format_bytes(fullest.total)} "
            f"but {found.question.device.name} has {format_bytes(fullest.capacity)} "
            f"({format_bytes(-fullest.headroom)} short)."
        )
    else:
        canvas.print(
            f"{canvas.paint('It does not fit', 'bold red')}: the ranks of a node keep {format_bytes(found.host_bytes)} "
            f"on its host, which has {format_bytes(found.host_capacity)} for them "
            f"({format_bytes(found.host_bytes - found.host_capacity)} short)."
        )
    if not changes:
        canvas.print("No change of one or two things makes it fit; `shardwise plan` looks at all of them.")
        return
    canvas.print("The cheapest changes that make it fit:")
    rows = [
        [f"  {change.words}", format_bytes(change.account.fullest.total), f"{100 * change.slower:+.1f} %",
         change.account.text]
        for change in changes
    ]  # fmt: skip
    table(["  change", "memory", "time", "the plan then"], rows, canvas)
