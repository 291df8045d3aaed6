"""The doctor and the real runtime: faults in real engines are found, and nothing is said of healthy ones.

On a machine with other things to do a real step has stalls, and the doctor says so rightly: of a healthy run, one of a
few steps must be without a word.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.explain.doctor.case import Case, Finding
from shardwise.explain.doctor.examine import examine
from shardwise.explain.doctor.replicas import find_exposed_sum
from shardwise.ranks.spawn import Ranks
from shardwise.trace.events import Lane
from shardwise.trace.run import Run
from shardwise.training.recipe import get_recipe
from tests.explain.doctor.patients import with_end
from tests.explain.doctor.real import Patient, examined_step, run_of, slowly_fed
from tests.training.programs import make_job

FAULTS: dict[str, tuple[str, int | None, Patient]] = {
    "a stage with three of four layers": (
        "slow stage",
        0,
        Patient(plan="pp=2,microbatches=8,layers=4+3"),
    ),
    "a sleeping stage": ("slow stage", 1, Patient(plan="pp=2,microbatches=8", slow={1: 0.02})),
    "a sleeping replica": ("straggler", 1, Patient(plan="dp=2,microbatches=4", slow={1: 0.02})),
    "one long sleep": ("stalls", 0, Patient(plan="pp=2,microbatches=8", stall=(0, 0.3))),
    "few microbatches": ("bubble", None, Patient(plan="pp=2,schedule=gpipe,microbatches=2", layer_seconds=0.02)),
    "recomputation with room to spare": (
        "needless recomputation",
        None,
        Patient(plan="pp=2,microbatches=8,recompute=full", layer_seconds=0.02),
    ),
    "every replica steps with all weights": (
        "long optimizer",
        None,
        Patient(plan="dp=2", layer_seconds=0.001, optimizer_seconds=0.1),
    ),
}
#: Steps in which ranks do what they should, long enough that what starts them is little.
HEALTHY = {
    "replicas": Patient(plan="dp=2,microbatches=4", layer_seconds=0.02),
    "replicas that share the optimizer": Patient(plan="dp=2,microbatches=4,zero=1", layer_seconds=0.02),
}
#: What else runs on the machine may hide what is looked for: one of a few steps decides.
ATTEMPTS = 4


def examinations(patient: Patient, two: Ranks) -> Iterator[list[Finding]]:
    """What the doctor finds in some steps, one after the other."""
    for _ in range(ATTEMPTS):
        run = run_of(patient, *two.run(examined_step, patient)[0])
        yield examine(run)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_real_engine_is_found(name: str, two: Ranks) -> None:
    kind, rank, patient = FAULTS[name]
    seen = list[list[tuple[str, tuple[int, ...]]]]()
    for found in examinations(patient, two):
        matching = [each for each in found if each.kind == kind and (rank is None or each.ranks == (rank,))]
        if matching:
            assert matching[0].fix
            return
        seen.append([(each.kind, each.ranks) for each in found])
    raise AssertionError(seen)


@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_step_of_a_real_engine_nothing_is_said(name: str, two: Ranks) -> None:
    seen = list[list[str]]()
    for found in examinations(HEALTHY[name], two):
        if not found:
            return
        seen.append([f"{each.kind}: {each.evidence}" for each in found])
    raise AssertionError(seen)


def test_buckets_of_4_kilobytes_are_found_and_what_is_advised_mends_them(two: Ranks) -> None:
    def finding(bucket_bytes: int) -> Finding:
        """Of a step with such buckets, all of whose ranks stand still for its sums for as long again."""
        patient = Patient(plan="dp=2", layer_seconds=0.0, bucket_bytes=bucket_bytes)
        run = run_of(patient, *two.run(examined_step, patient)[0])
        trace = with_end(run.trace, ("a sum of gradients", Lane.WAIT, run.trace.makespan))
        (found,) = find_exposed_sum(Case(replace(run, trace=trace)))
        return found

    found = finding(4096)
    assert found.kind == "small buckets"
    assert "on each, 39 sums of 4.5 KiB on average" in found.evidence
    advised = re.match(r"--set bucket_bytes=(\d+) ", found.fix)
    assert advised is not None
    recipe = get_recipe("tiny").changed({"bucket_bytes": advised[1]})
    assert finding(recipe.bucket_bytes).kind == "exposed sum"


def test_a_slow_loader_is_found_in_a_profile(two: Ranks, tmp_path: Path) -> None:
    measured = two.run(slowly_fed, make_job(tmp_path, "dp=2", steps=9), 1.0)[0]
    found = examine(Run(name="real", trace=measured.trace))
    assert "data wait" in {each.kind for each in found}
