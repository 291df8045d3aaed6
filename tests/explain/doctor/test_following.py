"""Whoever follows the doctor's advice arrives somewhere, and no step on the way is slower than the one before."""

from dataclasses import replace
from itertools import product

import pytest

from shardwise.explain.doctor.case import Finding
from shardwise.explain.doctor.examine import changes_of, examine, without_contradictions
from shardwise.trace.run import Unit
from tests.explain.doctor.patients import GIB, a_run, as_measured, played, with_bytes
from tests.explain.doctor.world import World

LAYER = Unit(1.0, 0.25 * GIB)
EMBEDDING, HEAD = Unit(0.05, 1.5 * GIB), Unit(2.0, 1.5 * GIB)

WORLDS = {
    "layers that are alike": World(units=(LAYER,) * 16),
    "an embedding and a head": World(units=(EMBEDDING, *(LAYER,) * 14, HEAD)),
    "the same of 7 units": World(units=(EMBEDDING, *(LAYER,) * 5, HEAD)),
    "one dear unit in the middle": World(units=(*(LAYER,) * 6, Unit(4.0, GIB), *(LAYER,) * 5)),
    "dear at the ends of stages": World(units=(LAYER, LAYER, LAYER, Unit(3.0, GIB)) * 3),
    "a slow host": World(units=(EMBEDDING, *(LAYER,) * 14, HEAD), host_seconds=0.04),
    "a slow host and a slow link": World(units=(LAYER,) * 12, host_seconds=0.02, latency=0.1),
    "a slow link": World(units=(LAYER,) * 16, latency=0.15),
    "memory that is short": World(
        units=(EMBEDDING, *(LAYER,) * 14, HEAD), activation_bytes=4 * GIB, memory_bytes=12 * GIB
    ),
    "units of which nothing is told": World(units=(EMBEDDING, *(LAYER,) * 14, HEAD), knows_units=False),
}
PLANS = [
    {"pp": str(ranks), "schedule": schedule, "microbatches": str(microbatches)}
    for ranks, schedule, microbatches in product((2, 4), ("1f1b", "gpipe", "interleaved", "zb-v", "zb-h1"), (4, 16, 64))
]
#: Of the square, what is tried without `--whole`.
FEW = [PLANS[at] for at in (0, 10, 15)]
UNEVEN = [{"pp": "4", "schedule": "1f1b", "microbatches": "8", "layers": cut} for cut in ("2+2+1+2", "1+2+1+3")]
#: What a world knows of. Another number of devices is another world.
_KEYS = {"schedule", "microbatches", "layers"}


def follow(world: World, plan: dict[str, str]) -> list[str]:
    """Type what is said first, again and again, until nothing more is said. Returns all that was typed."""
    typed: list[str] = []
    seen = [plan]
    while advice := [each for each in examine(world.run(plan)) if set(changes_of(each.fix)) & _KEYS]:
        finding, before = advice[0], world.truth(plan)
        changed = {**plan, **changes_of(finding.fix)}
        if changed["schedule"] != plan["schedule"]:
            changed.pop("layers", None)  # Another number of stages.
        after = world.truth(changed)
        typed.append(finding.fix)
        told = f"{plan}: {finding.kind}, {finding.fix}: {before} became {after}; typed {typed}"
        is_short = world.memory_bytes is not None and before.fullest_bytes > 0.9 * world.memory_bytes
        is_needed = is_short and after.fullest_bytes < before.fullest_bytes
        assert after.seconds <= before.seconds * (1 + 1e-9) or is_needed, told
        assert changed not in seen, told
        seen.append(changed)
        plan = changed
        assert len(typed) < 12, told
    return typed


@pytest.mark.parametrize("plans", [FEW, pytest.param(PLANS, marks=pytest.mark.whole)], ids=["few", "all"])
@pytest.mark.parametrize("name", WORLDS)
def test_advice_ends_and_no_step_is_slower(name: str, plans: list[dict[str, str]]) -> None:
    world = WORLDS[name]
    fitting = [*(plan for plan in plans if world.can_run(plan)), *(UNEVEN if len(world.units) == 7 else ())]
    typed = [follow(world, plan) for plan in fitting]
    assert any(typed), "some of these plans need advice"


def test_layers_go_where_they_save_memory_only_if_the_step_is_no_longer() -> None:
    def uneven(memory_bytes: float | None, cut: str) -> list[str]:
        """Stage 3 has three of seven units, of 10 GiB, and takes as long as the others."""
        held = [{"parameters": 4 * GIB}] * 3 + [{"parameters": 10 * GIB}]
        trace = with_bytes(as_measured(played("zb-v", 4, 64)), *held)
        found = examine(a_run(trace, f"pp=4,schedule=1f1b,layers={cut}", memory_bytes=memory_bytes))
        return [each.kind for each in found]

    assert uneven(None, "1+2+1+3") == []
    assert uneven(200 * GIB, "1+2+1+3") == []
    short = uneven(10.5 * GIB, "1+2+1+3")
    assert "nearly full" in short


def test_a_cut_that_is_no_slower_and_holds_less_is_told_with_both() -> None:
    # Stage 0 has its time from one unit, and its bytes from two others, for which there is room on stage 1.
    units = ((Unit(1.0, GIB), Unit(0.0, 2 * GIB), Unit(0.0, 2 * GIB)), (Unit(0.9, GIB),))
    held = [{"parameters": 5 * GIB}, {"parameters": GIB}]
    trace = with_bytes(as_measured(played("1f1b", 2, 64, slower={1: 0.9})), *held)
    (found,) = examine(replace(a_run(trace, "pp=2"), units=units))
    assert (found.kind, found.fix) == ("memory imbalance", "layers=2+2")
    assert found.about == "2.0 GiB less on the fullest rank (40 %), and a step no longer"


def test_nobody_is_told_to_do_what_is_done() -> None:
    trace = as_measured(played("1f1b", 2, 8, slower={0: 1.6}))
    # Nothing is to be had by layers where the slow stage has one, which cannot be cut.
    assert "slow stage" not in [each.kind for each in examine(a_run(trace, "pp=2,layers=1+3"))]


def test_more_microbatches_than_rows_are_no_advice() -> None:
    trace = as_measured(played("gpipe", 2, 4))
    told = [each.evidence for each in examine(a_run(trace, "pp=2,schedule=gpipe", facts={"batch": "4"}))]
    assert told
    assert not any("microbatches=8" in each for each in told)


def test_of_two_findings_that_would_set_one_key_the_better_is_told() -> None:
    finding = Finding(kind="a", problem="", evidence="", fix="microbatches=4", gain_seconds=1.0)
    other = replace(finding, fix="microbatches=16,zero=1", gain_seconds=2.0)
    third = replace(finding, fix="zero=1   (of all)", gain_seconds=0.5)
    assert without_contradictions([other, finding, third]) == [other, third]
