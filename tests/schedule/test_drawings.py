"""The drawings in our docstrings are true: a picture that nobody checks is a lie to come."""

import re
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

import shardwise.schedule
from shardwise.schedule import instruction
from shardwise.schedule import text as schedule_text
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.instruction import Instruction, Kind, parse
from shardwise.schedule.outcome import make, play_out
from shardwise.schedule.passes import backward, communication, offload, sharding, steps
from shardwise.schedule.placement import loop
from shardwise.schedule.question import make_question
from shardwise.schedule.text import print_schedule, read_schedule
from shardwise.trace import timeline
from shardwise.trace.timeline import draw
from tests.schedule.playing import played, texts, written

PACKAGE = Path(shardwise.schedule.__file__ or "").parent
CAPTION = re.compile(
    r"    shardwise schedule (?P<name>\S+) --stages (?P<stages>\d+) --microbatches (?P<microbatches>\d+)"
    r"(?: --memory (?P<memory>\S+))?"
)
#: What generators stand on, and no schedule itself.
NO_SCHEDULES = {"__init__", "building_block", "writer"}
DRAWN = sorted(f"generators.{path.stem}" for path in PACKAGE.glob("generators/*.py") if path.stem not in NO_SCHEDULES)
DRAWN.append("auto.search")


def docstring_of(module: str) -> str:
    return import_module(f"shardwise.schedule.{module}").__doc__ or ""


def caption_of(module: str) -> re.Match[str]:
    found = [match for line in docstring_of(module).splitlines() if (match := CAPTION.fullmatch(line))]
    assert len(found) == 1, f"{module} has {len(found)} captions"
    return found[0]


def block_below(docstring: str, line: str) -> list[str]:
    """The indented lines below a line, blank ones among them, without their indentation."""
    _, _, below = docstring.partition(f"{line}\n")
    block = takewhile(lambda each: not each or each.startswith("    "), below.splitlines())
    return "\n".join(each.removeprefix("    ") for each in block).strip("\n").splitlines()


def examples_in(module: object) -> list[str]:
    """The lines of a docstring that are set apart."""
    lines = (module.__doc__ or "").splitlines()
    return [line.removeprefix("    ") for line in lines if line.startswith("    ")]


@pytest.mark.parametrize("module", DRAWN)
def test_the_drawing_of_a_generator_is_what_its_caption_draws(module: str) -> None:
    caption = caption_of(module)
    question = make_question(
        num_ranks=int(caption["stages"]), num_microbatches=int(caption["microbatches"]), memory=caption["memory"]
    )
    outcome = play_out(make(caption["name"], question), question)
    assert block_below(docstring_of(module), caption[0]) == draw(outcome.trace, width=108)


def test_every_schedule_that_can_be_asked_for_is_drawn_in_its_own_module() -> None:
    drawn = {caption_of(module)["name"]: module for module in DRAWN}
    assert drawn == {
        **{name: f"generators.{entry.module}" for name, entry in CATALOGUE.items()},
        "auto": "auto.search",
    }


def test_backwards_are_taken_apart_as_drawn() -> None:
    whole, apart = (written(loop(2), "", order) for order in examples_in(backward)[0].split("   ->   "))
    assert backward.split_backward(whole) == apart


def test_transfers_stand_where_they_are_drawn() -> None:
    placed = texts(communication.insert_communication(make_schedule("1f1b", 2, 2)))
    assert examples_in(communication) == [f"rank {rank}   {order}" for rank, order in enumerate(placed)]


def test_the_end_of_a_step_is_as_drawn() -> None:
    schedule = make_schedule("1f1b", 2, 8)
    tied = written(schedule.placement.with_ties((0, 1)), *texts(schedule), num_microbatches=8)
    ended = steps.insert_steps(tied, reduce_gradients=True)
    (line,) = examples_in(steps)
    assert texts(ended)[0].endswith(line)


def test_gathers_and_releases_stand_where_they_are_drawn() -> None:
    caption, line = examples_in(sharding)
    assert caption == "rank 0, two chunks (stages 0 and 2), at most 2 gathered"
    gathered = sharding.insert_gathers(make_schedule("looped-bfs", 2, 2, 2), max_gathered=2)
    assert texts(gathered)[0] == line


def test_offloads_and_reloads_stand_where_they_are_drawn() -> None:
    (line,) = examples_in(offload)
    start, end = (part.split() for part in line.split(" ... "))
    compute = "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B5 0B0"
    order = offload.insert_offloads(written(loop(1), compute), which=lambda each: each.microbatch == 0)
    words = texts(order)[0].split()
    assert (words[: len(start)], words[-len(end) :]) == (start, end)


def test_the_file_form_is_as_shown() -> None:
    shown = "\n".join(examples_in(schedule_text)[:3]) + "\n\n" + "\n".join(examples_in(schedule_text)[3:]) + "\n"
    assert print_schedule(make_schedule("1f1b", 2, 2)) == shown
    assert read_schedule(shown) == make_schedule("1f1b", 2, 2)


def test_the_keys_that_a_file_may_have_are_read_as_shown() -> None:
    shown = dict(re.findall(r"`(\w+): ([^`]+)`", schedule_text.__doc__ or ""))
    assert set(shown) == {"pipes", "skips", "ties", "steps", "staleness"}
    ranks = "\n".join(f"rank {stage}: {stage}F0 {stage}B0" for stage in range(4))
    for key, value in shown.items():
        assert f"{key}: {value}\n" in print_schedule(read_schedule(f"{key}: {value}\nmicrobatches: 1\n{ranks}"))


def test_a_trace_is_drawn_as_shown() -> None:
    assert draw(played("gpipe", 2, 3), width=100) == examples_in(timeline)


def test_every_form_of_an_instruction_that_is_shown_parses_and_prints_back() -> None:
    words = " ".join(line[:16] for line in examples_in(instruction)).split()
    instructions = [parse(word) for word in words]
    assert [str(each) for each in instructions] == words
    assert {part.kind for each in instructions for part in each.parts} == set(Kind)
    assert Instruction(Kind.REDUCE, 2, 0, 1) in instructions
