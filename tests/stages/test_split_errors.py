"""A module that cannot be split as asked says so before anything is launched, with the numbers and a way out."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.stages.split import split
from tests.stages import odd_nets
from tests.stages.odd_nets import Chain, rows

EXAMPLE = {"x": rows()}
#: Where `Overheard` uses what it overheard.
LINE = next(number for number, line in enumerate(inspect.getsource(odd_nets).splitlines(), 1) if "left.mean()" in line)

CASES: list[tuple[str, Callable[[], Any], str]] = [
    (
        "more stages than units",
        lambda: split(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), 3, {"input": rows()}),
        "3 stages are asked for, but Sequential has only 2 units to divide: 0, 1\n  try: at most 2 stages",
    ),
    (
        "no stage",
        lambda: split(Chain(), 0, EXAMPLE),
        "a module cannot be split into 0 stages\n  try: num_stages=1 or more",
    ),
    (
        "a missing entry",
        lambda: split(Chain(), 2, {"input_ids": rows()}),
        "Chain.forward needs x, which the batch lacks; it has input_ids\n"
        "  try: name the batch's entries as forward does: {'x': ...}",
    ),
    (
        "a cut that does not add up",
        lambda: split(Chain(), 2, EXAMPLE, cut=[2, 3]),
        "the cut 2, 3 adds up to 5, but there are 4 units, 4 of them blocks\n"
        "  try: cut=[2, 2] (units: blocks.0, blocks.1, blocks.2, blocks.3)",
    ),
    (
        "a cut for other stages",
        lambda: split(Chain(), 2, EXAMPLE, cut=[2, 1, 1]),
        "the cut has 3 stages, but 2 are asked for\n  try: cut=[2, 2] (units: blocks.0, blocks.1, blocks.2, blocks.3)",
    ),
    (
        "an empty stage",
        lambda: split(Chain(), 2, EXAMPLE, cut=[4, 0]),
        "stage 1 of the cut has 0 units\n  try: cut=[2, 2] (units: blocks.0, blocks.1, blocks.2, blocks.3)",
    ),
    (
        "a unit that is not there",
        lambda: split(Chain(), 2, EXAMPLE, cut=["blocks.0", "block.2"]),
        "unknown unit 'block.2'; known: blocks.0, blocks.1, blocks.2, blocks.3\n  try: blocks.2",
    ),
    (
        "a cut that goes back",
        lambda: split(Chain(), 2, EXAMPLE, cut=["blocks.1", "blocks.2"]),
        "the first units of the stages, blocks.1, blocks.2, must begin with blocks.0 and go forward\n"
        "  try: cut=['blocks.0', ...], in the order of the units: blocks.0, blocks.1, blocks.2, blocks.3",
    ),
    (
        "too little memory",
        lambda: split(Chain(), 2, EXAMPLE, limit_bytes=2000),
        "no cut of 4 units into 2 stages keeps every stage within 2.0 KiB: all together are 4.4 KiB, the largest alone"
        " 1.1 KiB\n  try: more stages than 2, or a larger limit",
    ),
    (
        "something left behind",
        lambda: split(odd_nets.Overheard(), 4, EXAMPLE),
        "no cut of 4 units into 4 stages keeps together 1 pair of units that share what they do not return: blocks.1"
        " and blocks.3 (a hook or an attribute carries it, or it is written in place; used by mean at"
        f" odd_nets.py:{LINE} (return x, left.mean()))\n  try: fewer stages than 4",
    ),
    (
        "something left behind, and a cut through it",
        lambda: split(odd_nets.Overheard(), 2, EXAMPLE, cut=[2, 2]),
        "stage 1 uses something from inside blocks.1 of stage 0 that the unit does not return (a hook or an attribute"
        f" carries it, or it is written in place; used by mean at odd_nets.py:{LINE} (return x, left.mean()))\n"
        "  try: return it from the unit, or cut so that both are on one stage",
    ),
]


@pytest.mark.parametrize(("cause", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_error_says_what_is_wrong_and_what_to_do(cause: Callable[[], Any], text: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        cause()
    assert str(caught.value) == text


def test_random_numbers_that_two_stages_would_draw_are_refused_with_their_line() -> None:
    with pytest.raises(ShardwiseError, match=r"drawn outside any unit, at odd_nets.py:\d+ \(noise = torch.randn_like"):
        split(odd_nets.Noisy(), 2, EXAMPLE)


def test_a_run_that_calls_other_units_than_the_example_says_which() -> None:
    stages = split(odd_nets.Skips(), 4, EXAMPLE)
    last = stages.stages[3]
    assert last is not None
    values = {name: rows() for name in stages.reads[3]}
    with pytest.raises(ShardwiseError) as caught:
        last.run(values, {**EXAMPLE, "skip": True})
    assert str(caught.value) == (
        "the module called blocks.3 where on the example it called blocks.2 (unit 3 of 4): which units run depends on"
        " the data\n  try: decide inside a unit what to compute, or make each alternative one unit of the same stage"
    )


def test_what_glue_raises_before_the_stage_is_done_is_raised() -> None:
    stages = split(Chain(), 2, EXAMPLE)
    assert stages.stages[1] is not None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        stages.stages[1].run({name: torch.randn(3, 5) for name in stages.reads[1]}, EXAMPLE)
    # And the split is none the worse for it.
    stages.stages[1].run({name: rows() for name in stages.reads[1]}, EXAMPLE)
