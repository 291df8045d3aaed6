"""`shardwise train`: train a model with one command."""

import argparse
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise import environment
from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, also_called
from shardwise.planner.plan import Plan
from shardwise.training import fields
from shardwise.training.recipe import RECIPES, Recipe, get_recipe, read_recipe
from shardwise.units import counted, format_percent, format_seconds
from shardwise.working import step_aside

if TYPE_CHECKING:
    from shardwise.ranks.gpus import Gpus
    from shardwise.training.job import Job, Watching
    from shardwise.training.outcome import Result

DESCRIPTION = f"""
Train a model from a recipe: {", ".join(RECIPES)}, or a TOML file with the same
keys. The default recipe trains a small transformer on the bytes of Python's
own sources.

Everything is written to the folder of the run. A run that was stopped or
killed resumes from its last checkpoint when it is started again with the same
--folder.
"""

EXAMPLE = """
shardwise train tiny --show
shardwise train tiny --devices 1 --folder runs/tiny
shardwise train tiny --set steps=6 --set optimizer.rate=1e-3 --plan dp=2
"""

#: Options of other training programs, and their equivalents here.
_OPTIONS_OF_OTHERS = {
    **dict.fromkeys(("resume", "output_dir", "logdir"), "--folder"),
    **dict.fromkeys(("gpus", "nproc_per_node", "num_processes"), "--devices"),
}
#: Exit statuses of a run that a signal stopped, as in shells. After SIGUSR1 the status is 0: the stop was requested.
_STATUS = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}

#: The exit status of a run that stopped in order to continue without a host, or with one more: EX_TEMPFAIL.
STATUS_OF_OTHER_HOSTS = 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help=f"{', '.join(RECIPES)}, or a TOML file (default: bytes)"
    )
    parser.add_argument(
        "--plan",
        metavar="P",
        help="a plan such as pp=2,microbatches=8, a plan.toml, or auto (default: auto; resumed runs: their own)",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of ranks (default: all GPUs, or up to 4 processes)"
    )
    parser.add_argument("--cluster", metavar="C", help="a name or a cluster.toml, to choose the plan and place ranks")
    parser.add_argument(
        "--share-gpus", action="store_true", help="allow more ranks than GPUs; slow, for checking a plan"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the recipe")
    parser.add_argument("--folder", metavar="FOLDER", help="folder of the run; an existing run is resumed")
    parser.add_argument(
        "--verify-steps", type=int, default=0, metavar="N",
        help="every N steps, repeat one on another replica and compare weights of replicas (default: never)",
    )  # fmt: skip
    parser.add_argument(
        "--leave-out-slow",
        action="store_true",
        help="stop when a rank stays slow, so that launch continues without its host",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="P", help="export Prometheus metrics on this port of the first rank"
    )
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="H", help="address for --metrics-port (default: 127.0.0.1)"
    )
    parser.add_argument("--metrics-file", metavar="F", help="write the metrics to a .prom file, for node_exporter")
    parser.add_argument(
        "--copies-every", type=int, metavar="N",
        help="copy the state to memory every N steps; 0: never (default: under torchrun, at a cost below 1 %%)",
    )  # fmt: skip
    parser.add_argument("--show", action="store_true", help="show recipe and plan, and do not train")


def meant_by(option: str, value: str) -> str | None:
    """Return the equivalent of an unknown option: ours for another program's, or `--set` for a key of a recipe."""
    name = option.lstrip("-").replace("-", "_")
    if name in _OPTIONS_OF_OTHERS:
        return f"{_OPTIONS_OF_OTHERS[name]} {value or 'VALUE'}"
    keys = list(fields.leaves(Recipe()))
    key = also_called(name, keys) or next((key for key in keys if key.rpartition(".")[2] == name), None)
    return None if key is None else f"--set {key}={value or 'VALUE'}"


def run(arguments: argparse.Namespace) -> Answer:
    recipe = recipe_of(arguments)
    from shardwise.training.run import count_devices, train  # Loads torch.

    if arguments.devices is not None and arguments.devices < 1:
        raise ShardwiseError(f"--devices {arguments.devices}: it must be at least 1", remedy="--devices 1")
    copies_every = _copies_every(arguments.copies_every)
    asked = ask(arguments, recipe, count_devices())
    recipe, num_devices = asked.recipe, asked.num_devices
    if arguments.show:
        return _shown(recipe, asked.plan)
    from shardwise.training.folder import check_same, new_folder

    if arguments.folder is None and environment.find_world_size() is not None:
        raise ShardwiseError(
            "processes started by torchrun need the folder of the run",
            remedy=f"--folder runs/{recipe.name}",
        )
    folder = Path(arguments.folder) if arguments.folder else new_folder(recipe)
    check_same(folder, recipe)
    gpus: Gpus = "shared" if arguments.share_gpus else "own"
    job = replace(asked.job(folder, copies_every), watching=watching_of(arguments))
    step_aside()  # The first rank draws its own progress bar.
    result = train(job, num_devices, gpus=gpus)
    return Answer(data={}, render=lambda _: None) if result is None else _answer(result)


def _copies_every(asked: int | None) -> int | None:
    """Return the steps between copies. Without a launcher that restarts ranks there are none, unless asked for."""
    if asked is not None and asked < 0:
        raise ShardwiseError(
            f"--copies-every {asked}: it must be a number of steps", remedy="--copies-every 0 for none"
        )
    return 0 if asked is None and environment.find_world_size() is None else asked


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe from the arguments, or that of the resumed run, with the changes of --set."""
    kept = Path(arguments.folder) / "recipe.toml" if arguments.folder else None
    before = read_recipe(kept) if kept is not None and kept.is_file() else None
    if arguments.recipe is None and before is not None:
        recipe = before
    else:
        recipe = get_recipe(arguments.recipe or "bytes")
        if before is not None and recipe.precision == "auto":
            # The precision of the first start: a resumed run computes the same numbers on any device.
            recipe = recipe.changed({"precision": before.precision})
        if before is not None and recipe.data.masks is None:
            recipe = recipe.changed({"data.masks": before.data.masks})
    changes = {}
    for word in arguments.set:
        key, equals, value = word.partition("=")
        if not equals:
            raise ShardwiseError(f"--set {word} has no value", remedy=f"--set {key}=1")
        changes[key.strip()] = value.strip()
    return recipe.changed(changes)


def watching_of(arguments: argparse.Namespace) -> "Watching":
    """Return how the run is monitored."""
    from shardwise.training.job import Watching

    if arguments.verify_steps < 0:
        raise ShardwiseError(
            f"--verify-steps {arguments.verify_steps}: it must be 0 (never) or more", remedy="--verify-steps 100"
        )
    return Watching(
        verify_every=arguments.verify_steps,
        leaves_out_slow=arguments.leave_out_slow,
        host=arguments.metrics_host,
        port=arguments.metrics_port,
        file=None if arguments.metrics_file is None else Path(arguments.metrics_file),
    )


class Asked(NamedTuple):
    """The recipe, the plan and the number of ranks of a run, with all open choices made for the devices here."""

    recipe: Recipe
    plan: Plan
    num_devices: int
    compile: bool
    is_chosen: bool
    said: str | None
    seats: tuple[int, ...] | None = None

    def job(self, folder: Path, copies_every: int | None = 0) -> "Job":
        from shardwise.training.job import Job

        return Job(
            recipe=self.recipe,
            plan=self.plan,
            folder=folder,
            command=shlex.join(["shardwise", *sys.argv[1:]]),
            compile=self.compile,
            is_chosen=self.is_chosen,
            said=self.said,
            seats=self.seats,
            copies_every=copies_every,
        )


def ask(arguments: argparse.Namespace, recipe: Recipe, num_here: int) -> Asked:
    """Choose what the arguments leave open: the precision, the plan, and whether blocks are compiled."""
    from shardwise.training.device_defaults import (
        choose_compile,
        choose_precision,
        line_of_choices,
        with_masks,
        with_precision,
    )
    from shardwise.training.seating import find_seats, fitting

    own = _find_own_plan(arguments, num_here)
    given = own.plan if arguments.plan is None else None if arguments.plan == "auto" else Plan.parse(arguments.plan)
    count = environment.find_world_size() or arguments.devices or (num_here if given is None else given.num_ranks)
    if given is not None and given.precision != "fp32" and recipe.precision == "auto":
        recipe = with_precision(recipe, given.precision)
    precision = choose_precision(recipe, max(1, count))
    recipe = with_precision(recipe, precision.value)
    plan, num_devices, resized = _plan_of(arguments, given, recipe, num_here)
    compile = choose_compile(recipe, plan)
    cluster = arguments.cluster if resized is None else fitting(arguments.cluster, num_devices)
    seats = find_seats(recipe, plan, num_devices, cluster)
    told = None if seats is None else str(seats)
    said = "\n".join(filter(None, (own.said, resized, line_of_choices(precision, compile), told))) or None
    is_chosen, devices = recipe.compile == "auto", None if seats is None else seats.devices
    return Asked(with_masks(recipe), plan, num_devices, compile.value == "on", is_chosen, said, devices)


class _OwnPlan(NamedTuple):
    """The plan of the run that is resumed, if there is one and it is to be used; and a sentence about it."""

    plan: Plan | None = None
    said: str | None = None


def _find_own_plan(arguments: argparse.Namespace, num_here: int) -> _OwnPlan:
    """Return the plan of a resumed run, unless another is given or the number of ranks does not fit."""
    kept = Path(arguments.folder or "") / "plan.toml"
    if arguments.plan is not None or not _has_begun(arguments.folder) or not kept.is_file():
        return _OwnPlan()
    import torch

    plan, launched = Plan.load(kept), environment.find_world_size()
    count = launched or arguments.devices
    if count is None and torch.cuda.is_available() and not arguments.share_gpus and num_here < plan.num_ranks:
        count = num_here
    if count in (None, plan.num_ranks) or (count == 1 and plan.num_ranks == plan.pp):
        return _OwnPlan(plan, f"it goes on under its own plan {plan} (else: --plan auto)")
    if launched is not None:
        return _OwnPlan(plan)
    ranks = counted(plan.num_ranks, "rank")
    return _OwnPlan(None, f"its own plan {plan} is for {ranks}, and there are {count}: another is chosen")


def _plan_of(
    arguments: argparse.Namespace, given: Plan | None, recipe: Recipe, num_here: int
) -> tuple[Plan, int, str | None]:
    """Return the plan, its number of processes, and a sentence if it was resized."""
    from shardwise.training.seating import choose_plan_on, resize_plan_on

    num_devices = arguments.devices
    if given is None:
        count = num_devices or num_here
        return choose_plan_on(recipe, count, arguments.cluster), count, None
    plan = _in_precision(given, recipe)
    launched = environment.find_world_size()
    if launched is not None and launched != plan.num_ranks and _has_begun(arguments.folder):
        # `torchrun` has restarted the run with fewer or more ranks than before.
        found, said = resize_plan_on(plan, recipe, launched, arguments.cluster)
        return found, launched, said
    count = launched or num_devices or plan.num_ranks
    if count != 1 or plan.num_ranks != plan.pp:  # One process can run all ranks of a pipeline.
        plan.check_world(count)
    return plan, count, None


def _in_precision(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan in the recipe's precision. Refuse a plan with another precision."""
    if plan.precision not in ("fp32", recipe.precision):
        raise ShardwiseError(
            f"the plan has precision={plan.precision} and the recipe {recipe.precision}",
            remedy=f"--set precision={plan.precision}",
        )
    return replace(plan, precision=recipe.precision)


def _has_begun(run: str | None) -> bool:
    """Return whether there is a checkpoint, on disk or in memory."""
    return run is not None and any(any(Path(run).glob(each)) for each in ("checkpoints/step-*", "copies/id"))


def _shown(recipe: Recipe, plan: Plan) -> Answer:
    def render(canvas: Canvas) -> None:
        canvas.print(canvas.paint(f"# {recipe.name}", "bold"))
        canvas.print(recipe.to_toml())
        canvas.print(canvas.paint("# plan", "bold"))
        canvas.print(plan.to_toml().rstrip())

    return Answer(data={"recipe": recipe.to_toml(), "plan": str(plan), "reasons": dict(plan.reasons)}, render=render)


def _answer(result: "Result") -> Answer:
    def render(canvas: Canvas) -> None:
        stopped = f", stopped by {result.stopped_by}" if result.stopped_by else ""
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        held_out = "" if result.held_out_loss is None else f", held-out loss {result.held_out_loss:.4f}"
        rate = ", nothing was left to do"
        if result.tokens_per_second is not None:
            used = "" if result.mfu is None else f", MFU {format_percent(result.mfu)}"
            rate = f", {format_seconds(result.seconds)}, {result.tokens_per_second:.0f} tokens/s{used}"
        canvas.print(f"{canvas.paint(f'step {result.step}', 'bold')}{stopped}{loss}{held_out}{rate}")
        if result.sample is not None:
            canvas.print(f"\n{result.sample.rstrip()}\n")
        for name, path in (("run", result.run), ("checkpoint", result.checkpoint), ("report", result.report)):
            if path is not None:
                canvas.print(f"{canvas.paint(name, 'bold')} {path}")
        if result.stopped_by:
            canvas.print(f"it goes on with: shardwise train --folder {result.run}")

    is_for_hosts = result.leave_out or result.take_in
    status = STATUS_OF_OTHER_HOSTS if is_for_hosts else _STATUS.get(result.stopped_by or "", 0)
    return Answer(data=asdict(result), render=render, status=status)
