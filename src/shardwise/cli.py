"""The command line: a table of commands, each loaded only when chosen, and the one place where errors become text.

Exit status: 0 done; 1 a mistake of the user's, or a check that failed; 2 a wrong call; 130 interrupted; 141 the reader
of a pipe left early.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple, NoReturn, Protocol, cast

from shardwise import __version__, environment
from shardwise.answer import Answer, Canvas, canvas_on, json_text
from shardwise.errors import ShardwiseError, nearest, unknown
from shardwise.working import working_at, working_on


class Command(NamedTuple):
    """A row of the table: what to type, the module that does it, and what it is for in one line."""

    name: str
    module: str
    help: str


class CommandModule(Protocol):
    """What a command's module offers. It is imported when the command is chosen and not before."""

    DESCRIPTION: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, arguments: argparse.Namespace, /) -> Answer: ...

    # And, where it has one, `meant_by(option, value)`: what to type for an option that there is none of, or None.


COMMANDS = (
    Command("plan", "shardwise.planner.plan_command", "the best plan for a model on a cluster, and why"),
    Command("fit", "shardwise.planner.fit_command", "will a plan fit, rank by rank, and how long is a step"),
    Command("schedule", "shardwise.schedule.command", "draw, price and compare pipeline schedules"),
    Command("validate", "shardwise.planner.validate_command", "predictions against published measurements"),
    Command("check", "shardwise.parity.command", "a plan against one device: loss, gradients, next weights"),
    Command("train", "shardwise.training.command", "train a model: recipes, checkpoints, a report"),
    Command("profile", "shardwise.training.profile_command", "measure some steps: where the time and the memory go"),
    Command("report", "shardwise.explain.report_command", "one page that shows a run, or two beside each other"),
    Command("doctor", "shardwise.explain.doctor_command", "what holds a run up, and what to type against it"),
    Command("serve", "shardwise.serving.serve_command", "a model behind OpenAI's API, with a page to chat"),
    Command("chat", "shardwise.serving.chat_command", "talk with a model in the terminal"),
    Command(
        "bench", "shardwise.serving.bench_command", "how fast a server answers: first token, next tokens, throughput"
    ),
    Command("generate", "shardwise.serving.generate_command", "a file of requests answered, without a server"),
    Command("data", "shardwise.training.data.command", "token files from text, JSON lines and Parquet"),
    Command("convert", "shardwise.training.convert_command", "checkpoints to Hugging Face folders and back"),
)


class WrongCallError(ShardwiseError):
    """A command line that cannot be understood."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _in_our_words(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character shows another in its place; the answer is not lost for it.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = _obey(words)
        except ShardwiseError as error:
            if _is_to_tell(error):
                _tell(error, as_json="--json" in words)
            status = 2 if isinstance(error, WrongCallError) else 1
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has read enough. What is still buffered goes nowhere, or Python would complain of it on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _obey(words: list[str]) -> int:
    canvas = canvas_on(sys.stdout)
    if not words or words[0] in ("-h", "--help"):
        _draw_overview(canvas)
        return 0
    if words[0] == "--version":
        canvas.print(f"shardwise {__version__}")
        return 0
    command = _get_command(words[0])
    module = cast(CommandModule, import_module(command.module))
    parser = _make_parser(command, module)
    if not {"-h", "--help"}.isdisjoint(words):
        canvas.print(parser.format_help().rstrip())
        return 0
    meant_by = getattr(module, "meant_by", None)
    arguments = _parse(parser, words[1:], example=_examples(module)[0], meant_by=meant_by)
    with nullcontext() if arguments.json else working_on(sys.stderr):
        working_at(parser.prog)
        answer = module.run(arguments)
    if arguments.json:
        canvas.print(json_text(answer.data))
    else:
        answer.render(canvas)
    return answer.status


def _draw_overview(canvas: Canvas) -> None:
    width = max(len(command.name) for command in COMMANDS)
    canvas.print("Shardwise makes many GPUs work as one larger GPU.\n")
    canvas.print(f"{canvas.paint('usage:', 'bold')} shardwise COMMAND ...\n")
    for command in COMMANDS:
        canvas.print(f"  {canvas.paint(command.name.ljust(width), 'bold')}  {command.help}")
    canvas.print("\n  shardwise COMMAND --help   what it takes, with an example")
    canvas.print("  shardwise --version        which Shardwise this is")


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


def _make_parser(command: Command, module: CommandModule) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"shardwise {command.name}",
        description=module.DESCRIPTION.strip(),
        epilog="\n".join(["example:", *(f"  {line}" for line in _examples(module))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `--st 4` would mean something else the day a second option starts so.
    )
    # By default only a plain number may be negative: in `--times -1,1,1` argparse would see an option `-1,1,1`, and the
    # command would have no chance to say what is wrong with it.
    parser._negative_number_matcher = re.compile(r"-[\d.]")
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for machines")
    return parser


def _examples(module: CommandModule) -> list[str]:
    return [line.strip() for line in module.EXAMPLE.strip().splitlines()]


def _parse(
    parser: argparse.ArgumentParser, words: list[str], *, example: str,
    meant_by: Callable[[str, str], str | None] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """What the words say. A wrong call whose remedy is not plain from the words is answered with the example."""
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    before_dashes = words[: words.index("--")] if "--" in words else words
    try:
        # Asked first: else of a misspelt `--stagse 4` it is said that `--stages` is missing, or its 4 becomes a NAME.
        for place, word in enumerate(before_dashes):
            option, _, value = word.partition("=")
            if option.startswith("--") and option not in known:
                error = unknown("option", option, known)
                following = "".join(before_dashes[place + 1 : place + 2])
                value = value or ("" if following.startswith("--") else following)
                meant = None if meant_by is None else meant_by(option, value)
                raise WrongCallError(error.problem, remedy=meant or error.remedy)
        return parser.parse_args(words)
    except WrongCallError as error:
        remedy = error.remedy or _in_the_plan(error.problem, words) or example
        raise WrongCallError(error.problem, remedy=remedy) from None


def _in_the_plan(problem: str, words: list[str]) -> str | None:
    """What to type if words were not understood that are keys of a plan: they stand in one word with the others."""
    left = re.fullmatch(r"not understood: ((?:[\w.]+=\S+ ?)+)", problem)
    if left is None or "--plan" not in words[:-1]:
        return None
    from shardwise.planner.plan import read_keys  # Only ever needed on the way to an error.

    found = left[1].strip().replace(" ", ",")
    read_keys(found)
    return f"--plan {words[words.index('--plan') + 1]},{found}"


_REWORDED = (
    (r"argument (.+?): invalid int value: (.*)", r"\1 wants a whole number, not \2"),
    (r"argument (.+?): invalid float value: (.*)", r"\1 wants a number, not \2"),
    (r"argument (.+?): expected one argument", r"\1 wants a value"),
    (r"argument (.+?): not allowed with argument (.*)", r"\1 does not go with \2"),
    (r"argument (.+?): (.*)", r"\1: \2"),
    (r"the following arguments are required: (.*)", r"missing: \1"),
    (r"one of the arguments (.*) is required", r"missing: one of \1"),
    (r"unrecognized arguments: (.*)", r"not understood: \1"),
)


def _in_our_words(message: str) -> WrongCallError:
    """argparse's message, said as our other errors are."""
    choice = re.fullmatch(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", message)
    if choice is not None:
        option, word, choices = choice.groups()
        error = unknown(option, word, re.findall(r"[^', ]+", choices))
        prefix = f"{option} " if option.startswith("-") else ""
        return WrongCallError(error.problem, remedy=error.remedy and prefix + error.remedy)
    for pattern, words in _REWORDED:
        if (match := re.fullmatch(pattern, message)) is not None:
            return WrongCallError(match.expand(words))
    return WrongCallError(message)


def _is_to_tell(error: ShardwiseError) -> bool:
    """Under torchrun, what all ranks refuse is said once, by whoever comes to it first."""
    if environment.find_master() is None:
        return True
    from shardwise.ranks.worker import is_first_to_tell  # Loads torch.

    # Of what another rank has raised, that one shows where.
    error.problem = error.problem.partition("\n    Traceback")[0]
    return is_first_to_tell()


def _tell(error: ShardwiseError, *, as_json: bool) -> None:
    if as_json:
        print(json_text({"error": {"problem": error.problem, "remedy": error.remedy}}))
        return
    sys.stdout.flush()  # What was answered before the error is read before it.
    canvas = canvas_on(sys.stderr)
    canvas.print(f"{canvas.paint('error:', 'bold red')} {error}")
