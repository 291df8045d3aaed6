"""The doctor and the real runtime: faults in real engines are found.

That nothing is said of healthy runs is tested with simulated ones (`test_corpus.py`): on a machine with other things
to do, a real step has stalls, and the doctor says so rightly.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.runtime.spawn import Ranks
from shardwise.schedule.replay import Replay
from shardwise.trace.doctor.examine import examine
from shardwise.trace.doctor.finding import Finding
from shardwise.trace.run import Run
from tests.trace.doctor.real import Patient, examined_step, run_of, slowly_fed
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
#: What else runs on the machine may hide what is looked for: one of a few steps decides.
ATTEMPTS = 4


def examinations(patient: Patient, two: Ranks) -> Iterator[list[Finding]]:
    """What the doctor finds in some steps, one after the other."""
    for _ in range(ATTEMPTS):
        run = run_of(patient, *two.run(examined_step, patient)[0])
        yield examine(run, Replay.of(run.trace))


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


def test_a_slow_loader_is_found_in_a_profile(two: Ranks, tmp_path: Path) -> None:
    measured = two.run(slowly_fed, make_job(tmp_path, "dp=2", steps=9), 1.0)[0]
    found = examine(Run(name="real", trace=measured.trace), Replay.of(measured.trace))
    assert "data wait" in {each.kind for each in found}
