"""Parsing of command lines. Wrong arguments are reported like all other errors."""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

from shardwise.answer import Answer
from shardwise.errors import ShardwiseError, unknown


class CommandModule(Protocol):
    """The interface of a command's module, which is imported only when the command is chosen."""

    DESCRIPTION: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, arguments: argparse.Namespace, /) -> Answer: ...

    # Optionally also `meant_by(option, value)`: what to type instead of an unknown option, or None.


class WrongCallError(ShardwiseError):
    """A command line that cannot be understood."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _in_our_words(message)


def make_parser(name: str, module: CommandModule) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"shardwise {name}",
        description=module.DESCRIPTION.strip(),
        epilog="\n".join(["example:", *(f"  {line}" for line in examples(module))]),
        # The width is fixed because the option for --help asks for that of the terminal, and imports a lot for it.
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=80),
        allow_abbrev=False,  # `--st 4` would change its meaning with a second option that starts so.
    )
    # By default only a plain number may be negative: in `--times -1,1,1` argparse would see an option `-1,1,1`, and the
    # command would have no chance to say what is wrong with it.
    parser._negative_number_matcher = re.compile(r"-[\d.]")
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def examples(module: CommandModule) -> list[str]:
    return [line.strip() for line in module.EXAMPLE.strip().splitlines()]


def parse(
    parser: argparse.ArgumentParser, words: list[str], module: CommandModule, *,
    remedy_for: Callable[[str, list[str]], str | None] = lambda _problem, _words: None,
) -> argparse.Namespace:  # fmt: skip
    """Parse the words. A wrong call without a remedy of its own gets the nearest example of the command.

    `remedy_for` may find a remedy from the problem and the words.
    """
    meant_by = getattr(module, "meant_by", None)
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    words = _with_values(words, known)
    before_dashes = words[: words.index("--")] if "--" in words else words
    try:
        # Checked first: for a misspelt `--stagse 4` argparse would report a missing `--stages`, or take 4 as a NAME.
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
        remedy = error.remedy or remedy_for(error.problem, words) or _nearest_example(examples(module), words)
        raise WrongCallError(error.problem, remedy=remedy) from None


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
    """Return argparse's message, reworded like our other errors."""
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


# Options whose value is a command line of another program, which may begin like an option.
_QUOTING = ("--from",)


def _with_values(words: list[str], known: list[str]) -> list[str]:
    """Join quoted options of another program (`--from '--bf16 --tp 2'`) with the option before them, as its value. They
    are recognised by a blank, which our options never have; after `--from`, also by not being an option of ours."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_theirs = " " in word or (before in _QUOTING and word.partition("=")[0] not in known)
        if word.startswith("--") and word != "--" and is_theirs and before in known:
            joined[-1] = f"{before}={word}"
        else:
            joined.append(word)
    return joined


def _nearest_example(lines: list[str], words: list[str]) -> str:
    """Return the example that shares most options with the words; of equals the first."""
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    return max(lines, key=lambda line: len(typed.intersection(line.split())))
