"""Every program of users under tensor parallelism trains as plain torch does, or is refused with a line to change."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from shardwise.ranks.spawn import Ranks
from tests.habits import tensor
from tests.habits.tensor import Verdict
from tests.habits.tensor_models import PROGRAMS

#: Every tenth program is run without `--whole`.
BY_DEFAULT = {"the root of the number of channels", *list(PROGRAMS)[::10]}


@pytest.fixture(scope="module")
def judged(two: Ranks, pytestconfig: pytest.Config) -> list[dict[str, Verdict]]:
    """What came of the programs, on both ranks."""
    return two.run(tensor.judge, [name for name in PROGRAMS if name in BY_DEFAULT or pytestconfig.getoption("--whole")])


def some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.whole) for name in names]


@pytest.mark.parametrize("name", some(PROGRAMS))
def test_it_trains_as_plain_torch_does_or_is_refused(judged: list[dict[str, Verdict]], name: str) -> None:
    program = PROGRAMS[name]
    for verdict in (each[name] for each in judged):
        assert not verdict.error
        assert bool(verdict.refused) == bool(program.refused), verdict.refused
        assert program.refused in verdict.refused
        if not program.refused:
            assert verdict.worst < 1e-5, verdict.where


@pytest.mark.parametrize(
    "name", some(name for name, each in PROGRAMS.items() if "tp=2" in each.plan and not each.refused)
)
def test_layers_are_cut_but_for_those_that_must_be_whole(judged: list[dict[str, Verdict]], name: str) -> None:
    program, verdict = PROGRAMS[name], judged[0][name]
    layers = {each.rpartition(".")[0] for each in verdict.whole}
    for part in program.whole:
        assert any(each == part or each.endswith(f".{part}") for each in layers), (part, layers)
    if not program.whole:
        assert [each[: len(program.warns)] for each in verdict.warned] == ([program.warns] if program.warns else [])
        assert verdict.cut


def test_what_stays_whole_is_told_with_its_reason_its_cost_and_the_line_to_say_so(
    judged: list[dict[str, Verdict]],
) -> None:
    (told,) = judged[0]["the root of the number of channels"].warned
    assert re.fullmatch(
        r"tp=2: blocks\.\*\.down, blocks\.\*\.up whole on every rank, since what blocks\.0\.down returns differs by"
        r" \S+ %\. This is 3\.2 KiB of weights and 1\.54 kFLOP a token of forward more on each rank;"
        r' tensor=\{"blocks\.\*\.down": "whole", "blocks\.\*\.up": "whole"\} says that it is meant',
        told,
    )
    assert judged[1]["the root of the number of channels"].warned == ()
