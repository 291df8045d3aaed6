"""The command line with a command of our own making, so that nothing here depends on what the real ones do."""

import argparse
import gc
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwise import cli
from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError
from shardwise.units import parse_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="thing")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--hop", type=parse_seconds, default=0.0)
    parser.add_argument("--times", default="")
    parser.add_argument("--shape", choices=["loop", "v"], default="loop")


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.name == "broken":
        raise ShardwiseError("it is broken", remedy="toy whole --stages 4")
    if arguments.name == "interrupt":
        raise KeyboardInterrupt

    def render(canvas: Canvas) -> None:
        canvas.print(canvas.paint(f"{arguments.name} of {arguments.stages} stages {arguments.times}".strip(), "red"))

    data = {"name": arguments.name, "hop": arguments.hop}
    return Answer(data=data, render=render, status=int(arguments.name == "failed"))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardwise toy`, and no other command."""
    module = ModuleType("toy_command")
    contents = {
        "add_arguments": add_arguments,
        "run": run,
        "DESCRIPTION": "A toy.",
        "EXAMPLE": "shardwise toy --stages 4",
    }
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "toy_command", module)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command(name="toy", module="toy_command", help="plays"),))


Captured = pytest.CaptureFixture[str]


def test_a_command_draws_for_a_person(capsys: Captured) -> None:
    assert cli.main(["toy", "--stages", "4"]) == 0
    assert capsys.readouterr().out == "thing of 4 stages\n"


def test_a_command_answers_a_machine_in_json(capsys: Captured) -> None:
    assert cli.main(["toy", "--stages", "4", "--hop", "2ms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "thing", "hop": 0.002}


def test_the_status_of_an_answer_is_the_exit_status(capsys: Captured) -> None:
    assert cli.main(["toy", "failed", "--stages", "4"]) == 1
    assert capsys.readouterr().out == "failed of 4 stages\n"


def test_colour_reaches_the_drawing_when_it_is_forced(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli.main(["toy", "--stages", "4"])
    cli.main(["toy", "broken", "--stages", "4"])
    captured = capsys.readouterr()
    assert captured.out == "\x1b[31mthing of 4 stages\x1b[0m\n"
    assert captured.err == "\x1b[1;31merror:\x1b[0m it is broken\n  try: toy whole --stages 4\n"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("toy broken --stages 4", 1, "it is broken\n  try: toy whole --stages 4"),
        ("toy --stages 4 --hop -1", 1, "'-1' is not a time: it is negative\n  try: 1"),
        ("toy", 2, "missing: --stages\n  try: shardwise toy --stages 4"),
        (
            "toy --stagse 4",
            2,
            "unknown option '--stagse'; known: --help, --stages, --hop, --times, --shape, --json\n  try: --stages",
        ),
        (
            "toy --qqq=1",
            2,
            "unknown option '--qqq'; known: --help, --stages, --hop, --times, --shape, --json\n"
            "  try: shardwise toy --stages 4",
        ),
        ("toy --stages", 2, "--stages wants a value\n  try: shardwise toy --stages 4"),
        ("toy --stages four", 2, "--stages wants a whole number, not 'four'\n  try: shardwise toy --stages 4"),
        ("toy --stages 4 --shape loob", 2, "unknown --shape 'loob'; known: loop, v\n  try: --shape loop"),
        ("toy a b --stages 4", 2, "not understood: b\n  try: shardwise toy --stages 4"),
        ("toy --stages 4 -z", 2, "not understood: -z\n  try: shardwise toy --stages 4"),
        ("--json toy", 2, "the first word must be a command, not '--json'; known: toy\n  try: shardwise toy --json"),
        ("to", 2, "unknown command 'to'; known: toy\n  try: shardwise toy"),
    ],
)
def test_an_error_is_told_in_one_shape(words: str, status: int, text: str, capsys: Captured) -> None:
    assert cli.main(words.split()) == status
    if "--json" in words:
        error = json.loads(capsys.readouterr().out)["error"]
        assert f"{error['problem']}\n  try: {error['remedy']}" == text
    else:
        assert capsys.readouterr() == ("", f"error: {text}\n")


def test_an_error_is_json_on_stdout_for_a_machine(capsys: Captured) -> None:
    assert cli.main(["toy", "broken", "--stages", "4", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": {"problem": "it is broken", "remedy": "toy whole --stages 4"}}
    assert captured.err == ""


def test_a_list_that_begins_with_a_negative_number_reaches_the_command(capsys: Captured) -> None:
    assert cli.main(["toy", "--stages", "4", "--times", "-1,1,1"]) == 0
    assert capsys.readouterr().out == "thing of 4 stages -1,1,1\n"


def test_help_needs_no_other_word_to_be_right(capsys: Captured) -> None:
    assert cli.main(["toy", "--help"]) == cli.main(["toy", "-h"]) == 0
    assert capsys.readouterr().out.endswith("example:\n  shardwise toy --stages 4\n")


def test_ctrl_c_is_one_line_and_status_130(capsys: Captured) -> None:
    assert cli.main(["toy", "interrupt", "--stages", "4"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_brief_command_within_another_program_leaves_its_collections_alone(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", [command._replace(is_brief=True) for command in cli.COMMANDS])
    assert cli.main(["toy", "--stages", "4"]) == 0
    assert capsys.readouterr().out
    assert gc.isenabled()


def test_a_reader_who_leaves_early_is_no_error() -> None:
    # The reader is gone before the first byte: what is printed can only fail at the flush, as under `| head`.
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); from shardwise.cli import main; sys.exit(main([]))"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stdin.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), complaint) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such file")
def test_a_full_disk_under_the_output_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["toy", "--stages", "4"]) == 1
    assert "the answer was found, and cannot be printed: No space left on device" in capsys.readouterr().err


def test_a_character_that_the_terminal_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["toy", "größe", "--stages", "4"]) == 0
    assert written.getvalue() == b"gr??e of 4 stages\n"
