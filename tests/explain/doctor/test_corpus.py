"""The doctor finds each of the seeded faults, and says nothing of runs that have none."""

import re

import pytest

from shardwise.explain.doctor.case import Finding
from shardwise.explain.doctor.examine import examine
from shardwise.trace.run import Run
from tests.explain.doctor.corpus import FAULTS, HEALTHY
from tests.explain.doctor.patients import a_run, played


def found_in(run: Run) -> list[Finding]:
    return examine(run)


def test_the_corpus_is_large_enough() -> None:
    assert len(FAULTS) >= 25
    assert len(HEALTHY) >= 10


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_numbers_and_something_to_type(name: str) -> None:
    kind, make = FAULTS[name]
    run = make()
    matching = [finding for finding in found_in(run) if finding.kind == kind]
    assert len(matching) == 1, f"{[finding.kind for finding in found_in(run)]}"
    (finding,) = matching
    assert re.search(r"\d", finding.evidence)
    assert finding.fix
    if finding.gain_seconds is None:
        assert finding.about
    else:
        assert 0.03 * run.trace.makespan <= finding.gain_seconds < run.trace.makespan


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_run(name: str) -> None:
    assert found_in(HEALTHY[name]()) == []


def test_the_predicted_gain_of_even_stages_is_what_the_simulator_says() -> None:
    slow, even = played("1f1b", 4, 16, slower={1: 1.5}), played("1f1b", 4, 16, slower=dict.fromkeys(range(4), 1.125))
    (finding,) = [each for each in found_in(a_run(slow)) if each.kind == "slow stage"]
    assert finding.gain_seconds == pytest.approx(slow.makespan - even.makespan)
    assert finding.ranks == (1,)


def test_layers_are_moved_where_they_are_known() -> None:
    (finding,) = [
        each
        for each in found_in(a_run(played("1f1b", 4, 16, slower={1: 1.5}), "pp=4,layers=6+9+6+6"))
        if each.kind == "slow stage"
    ]
    assert finding.fix in ("layers=7+7+7+6", "layers=7+7+6+7", "layers=6+7+7+7", "layers=7+6+7+7")


def test_the_predicted_gain_of_another_schedule_is_what_the_simulator_says() -> None:
    now = played("1f1b", 4, 8)
    (finding,) = [each for each in found_in(a_run(now)) if each.kind == "bubble"]
    assert finding.fix == "schedule=zb-v"
    assert finding.gain_seconds == pytest.approx(now.makespan - played("zb-v", 4, 8).makespan)
