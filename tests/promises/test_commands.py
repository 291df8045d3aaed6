"""What holds for every command: help with an example, `--json`, exit statuses, and no colour where none is wanted."""

import argparse
import json
from contextlib import nullcontext
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

import shardwise
from shardwise.answer import Answer, canvas_on
from shardwise.cli import COMMANDS, Command, main
from shardwise.trace.journal import note
from tests.probing.quick import quickly
from tests.promises.processes import run_shardwise

#: What makes an example shorter: it is answered in the same words.
_LESS = {"check": ("--steps", "2"), "generate": ("--kv", "64MiB")}

every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


@every_command
def test_help_shows_an_example_that_calls_this_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command.name, "--help"]) == 0
    _, _, example = capsys.readouterr().out.partition("example:")
    assert f"shardwise {command.name} " in example


@every_command
def test_json_is_offered(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    main([command.name, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    # Those that start ranks: where the server that they are forked from is up.
    [pytest.param(each, marks=pytest.mark.xdist_group("ranks") if each.name == "check" else ()) for each in COMMANDS],
    ids=lambda command: command.name,
)
def test_every_example_answers_in_json_and_has_no_colour_in_a_pipe_unless_it_is_forced(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An example may train for a while, so each is run once, and what it answers is drawn in every way."""
    monkeypatch.chdir(tmp_path)  # An example may save a file.
    if command.name == "status":
        Path("runs/first").mkdir(parents=True)
        note(Path("runs/first"), "start", step=0, plan="dp=1")
    module = import_module(command.module)
    run, answers = module.run, list[Answer]()

    def noted(arguments: argparse.Namespace) -> Answer:
        answers.append(run(arguments))
        return answers[-1]

    monkeypatch.setattr(module, "run", noted)
    for example in module.EXAMPLE.strip().splitlines():
        _, name, *words = example.split()
        with quickly() if name == "probe" else nullcontext():
            assert main([name, "--json", *words, *_LESS.get(command.name, ())]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert "\x1b" not in drawn(answers[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in drawn(answers[0])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in drawn(answers[0])


def drawn(answer: Answer) -> str:
    """What a person reads of an answer in a pipe."""
    pipe = StringIO()
    answer.render(canvas_on(pipe))
    return pipe.getvalue()


def test_a_process_of_its_own_has_no_colour_in_a_pipe_unless_it_is_forced() -> None:
    words = ("schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    assert "\x1b" not in run_shardwise(*words).stdout
    assert "\x1b" in run_shardwise(*words, FORCE_COLOR="1").stdout
    assert "\x1b" not in run_shardwise(*words, FORCE_COLOR="1", NO_COLOR="1").stdout


@every_command
def test_the_overview_names_it(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    width = max(len(each.name) for each in COMMANDS)
    assert f"{command.name.ljust(width)}  {command.help}" in capsys.readouterr().out


def test_no_words_and_help_are_the_same_and_no_mistake() -> None:
    alone, helped = run_shardwise(), run_shardwise("--help")
    assert (alone.returncode, helped.returncode) == (0, 0)
    assert alone.stdout == helped.stdout
    assert alone.stdout.startswith("Shardwise makes many GPUs work as one larger GPU.\n")


def test_version_is_printed_alone() -> None:
    assert run_shardwise("--version").stdout == f"shardwise {shardwise.__version__}\n"


def test_a_wrong_call_ends_with_2_and_says_so_on_stderr_only() -> None:
    finished = run_shardwise("shedule")
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("error: unknown command 'shedule'")
