"""The command line: a table of commands, each loaded only when chosen, and the one place where errors become text.

Exit status: 0 done; 1 a mistake of the user's, or a check that failed; 2 a wrong call; 130 interrupted; 141 the reader
of a pipe left early.
"""

import atexit
import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, cast

from shardwise import __version__, environment
from shardwise.answer import Canvas, canvas_on, json_text
from shardwise.command_line import CommandModule, WrongCallError, make_parser, parse
from shardwise.errors import ShardwiseError, nearest, unknown, warn_plainly
from shardwise.interrupts import ended_by_sigterm
from shardwise.working import working_at, working_on


class Command(NamedTuple):
    """A row of the table: the name of a command, its module, and its purpose in one line.

    A brief command computes an answer and exits: it leaves no garbage that would have to be collected. One that is
    `stopped` by SIGTERM ends as by Ctrl-C: it has something to say then, and processes to end.
    """

    name: str
    module: str
    help: str
    is_brief: bool = False
    is_stopped: bool = False


COMMANDS = (
    Command(
        "plan",
        "shardwise.planner.plan_command",
        "find the best plan for a model on a cluster, and say why",
        is_brief=True,
    ),
    Command(
        "fit", "shardwise.planner.fit_command", "predict memory and step time of a plan, rank by rank", is_brief=True
    ),
    Command("probe", "shardwise.probing.command", "measure devices, links and collectives for a cluster.toml"),
    Command("schedule", "shardwise.schedule.command", "draw, price and compare pipeline schedules"),
    Command("validate", "shardwise.planner.validate_command", "compare predictions with published measurements"),
    Command("check", "shardwise.parity.command", "compare a plan with one device: loss, gradients, weights"),
    Command("train", "shardwise.training.command", "train a model from a recipe, with checkpoints and a report"),
    Command("profile", "shardwise.training.profile_command", "measure where the time and memory of a step go"),
    Command("launch", "shardwise.launch.command", "start train or serve here, on hosts, Slurm or Kubernetes"),
    Command("status", "shardwise.launch.status_command", "show the state of a run: hosts, steps, restarts and why"),
    Command("report", "shardwise.explain.report_command", "write a page that shows a run, or compares two"),
    Command("doctor", "shardwise.explain.doctor_command", "find what slows a run down, and print the remedy"),
    Command(
        "serve",
        "shardwise.serving.serve_command",
        "serve a model behind OpenAI's API, with a chat page",
        is_stopped=True,
    ),
    Command("chat", "shardwise.serving.chat_command", "chat with a model in the terminal", is_stopped=True),
    Command(
        "bench",
        "shardwise.serving.bench_command",
        "measure a server: first token, next tokens, throughput",
        is_stopped=True,
    ),
    Command(
        "generate", "shardwise.serving.generate_command", "answer a file of requests, without a server", is_stopped=True
    ),
    Command("data", "shardwise.training.data.command", "make token files from text, JSON lines and Parquet"),
    Command("convert", "shardwise.training.convert_command", "convert checkpoints to Hugging Face folders and back"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character shows another in its place; the answer is not lost for it.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = _obey(words, has_process=argv is None)
        except ShardwiseError as error:
            if _is_to_tell(error):
                _tell(error, as_json="--json" in words)
            status = 2 if isinstance(error, WrongCallError) else 1
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # `| head` has read enough.
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _obey(words: list[str], *, has_process: bool) -> int:
    """Run a command, which has the process to itself, or is called from within another program."""
    canvas = canvas_on(sys.stdout)
    if has_process:
        warn_plainly()
    if not words or words[0] in ("-h", "--help"):
        _draw_overview(canvas)
        return 0
    if words[0] == "--version":
        canvas.print(f"shardwise {__version__}")
        return 0
    command = _get_command(words[0])
    if command.name == "train" and environment.find_master() is not None and not environment.is_from_standby():
        from shardwise.standby.asker import run_on_standby  # Of ranks alone that are started again.

        folder = words[words.index("--folder") + 1 :] if "--folder" in words else []
        status = run_on_standby(Path(folder[0]), "shardwise", words) if folder else None
        if status is not None:
            return status
    if command.is_brief and has_process:
        # An eighth of the time that `fit` takes: collections while modules are imported, and at the process's end.
        gc.disable()
        atexit.register(gc.freeze)
    module = cast(CommandModule, import_module(command.module))
    parser = make_parser(command.name, module)
    if not {"-h", "--help"}.isdisjoint(words):
        canvas.print(parser.format_help().rstrip())
        return 0
    arguments = parse(parser, words[1:], module, remedy_for=_in_the_plan)
    with nullcontext() if arguments.json else working_on(sys.stderr):
        working_at(parser.prog)
        with ended_by_sigterm() if command.is_stopped and has_process else nullcontext():
            answer = module.run(arguments)
    try:
        if arguments.json:
            canvas.print(json_text(answer.data))
        else:
            answer.render(canvas)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise ShardwiseError(
            f"the answer was found, and cannot be printed: {error.strerror}", remedy="another place for the output"
        ) from None
    return answer.status


def _drop_output() -> None:
    """Let what is still buffered go nowhere, or Python would complain of it on the way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _draw_overview(canvas: Canvas) -> None:
    width = max(len(command.name) for command in COMMANDS)
    canvas.print("Shardwise makes many GPUs work as one larger GPU.\n")
    canvas.print(f"{canvas.paint('usage:', 'bold')} shardwise COMMAND ...\n")
    for command in COMMANDS:
        canvas.print(f"  {canvas.paint(command.name.ljust(width), 'bold')}  {command.help}")
    canvas.print("\n  shardwise COMMAND --help   show the options, with an example")
    canvas.print("  shardwise --version        print the version")


def _get_command(word: str) -> Command:
    for command in COMMANDS:
        if command.name == word:
            return command
    names = [command.name for command in COMMANDS]
    if word.startswith("-"):
        # An option that every command has is right, and only too early.
        meant = f"{names[0]} --json" if word == "--json" else nearest(word, ["--help", "--version"]) or "--help"
        problem = f"the first word must be a command, not {word!r}; known: {', '.join(names)}"
        raise WrongCallError(problem, remedy=f"shardwise {meant}")
    error = unknown("command", word, names)
    raise WrongCallError(error.problem, remedy=f"shardwise {error.remedy or '--help'}")


def _in_the_plan(problem: str, words: list[str]) -> str | None:
    """Return the remedy if the unknown arguments are keys of a plan, which belong in one argument with the others."""
    left = re.fullmatch(r"not understood: ((?:[\w.]+=\S+ ?)+)", problem)
    if left is None or "--plan" not in words[:-1]:
        return None
    from shardwise.planner.plan import read_keys  # Only ever needed on the way to an error.

    found = left[1].strip().replace(" ", ",")
    read_keys(found)
    return f"--plan {words[words.index('--plan') + 1]},{found}"


def _is_to_tell(error: ShardwiseError) -> bool:
    """Return whether to print an error. Under torchrun, only the first rank that reaches it does."""
    if environment.find_master() is None:
        return True
    from shardwise.ranks.worker import is_first_to_tell  # Loads torch.

    # The rank that raised the error prints its own traceback.
    error.problem = error.problem.partition("\n    Traceback")[0]
    return is_first_to_tell()


def _tell(error: ShardwiseError, *, as_json: bool) -> None:
    if as_json:
        print(json_text({"error": {"problem": error.problem, "remedy": error.remedy}}))
        return
    sys.stdout.flush()  # Output from before the error must appear before it.
    canvas = canvas_on(sys.stderr)
    canvas.print(f"{canvas.paint('error:', 'bold red')} {error}")
