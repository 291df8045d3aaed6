"""The page of what was run on GPUs says what the record has, and the record is of every plan that is proven."""

import pytest

from tests.gpu.files import files_for_gpus
from tests.gpu.page import PAGE, page, read
from tests.parity.cases import CASES


def test_the_page_is_made_from_the_record() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_every_plan_was_run_on_a_gpu_and_was_the_same_model() -> None:
    rows = {(row["ranks"], row["model"], row["plan"]): row for row in read()["rows"]}
    assert rows.keys() == {(count, model, plan) for count, cases in CASES.items() for model, plan in cases}
    assert all(row["problem"] is None and max(row["errors"].values()) < 1e-5 for row in rows.values())


@pytest.mark.parametrize("part", ["bf16", "families", "faults"])
def test_what_else_was_run_on_a_gpu_has_passed(part: str) -> None:
    rows = read().get(part, [])
    if not rows:
        pytest.skip(f"{part}: not run on a GPU yet")
    # What was mended after a run, and could not be tried again, says so in the record and on the page, until the next
    # run writes over it.
    assert [row for row in rows if row["problem"] is not None and "since" not in row] == []


def test_all_kinds_of_rows_are_on_the_page() -> None:
    alone = dict.fromkeys(("loss", "norm", "gradient", "weight"), 2e-3)
    row = {"ranks": 2, "model": "tied", "plan": "dp=2", "precision": "bf16", "errors": alone, "problem": None}
    family = {**row, "model": "family llama", "alone": {}, "precision": "fp32"}
    wrong = {**family, "plan": "tp=2", "problem": "RankError: gone"}
    lost = {"how": "spawn", "plan": "dp=2", "fault": "kill", "rank": 1, "seconds": 0.5, "sentence": "rank 1 was killed"}
    told = page(
        {
            **read(),
            "shares_processes": True,
            "note": "Faults were run again on a later commit.",
            "bf16": [{**row, "alone": alone}],
            "families": [family, wrong],
            "faults": [{**lost, "problem": None}, {**lost, "problem": "rank 0 was named", "since": "mended since"}],
            "others": [
                {"part": "nccl", "name": "nccl", "status": 0, "seconds": 81.2},
                {"part": "pytest", "name": "tests/nets/test_gpu.py", "status": 1, "seconds": 9.0},
            ],
        }
    )
    assert "\n\nFaults were run again on a later commit.\n\n" in told
    assert "1 of 1 plans passed." in told
    assert "| `dp=2` | tied | 2.0e-03 / 2.0e-03 | " in told
    assert "| llama | 2.0e-03 | RankError: gone |" in told
    assert "| spawn | `dp=2` | kill | 1 | 0.5 s | rank 1 was killed |" in told
    assert "| spawn | `dp=2` | kill | 1 | 0.5 s | rank 0 was named; mended since |" in told
    assert "| NCCL programs | all | passed | 81 s |" in told
    assert "Short test files share a process" in told
    assert "| tests | `tests/nets/test_gpu.py` | failed with status 1 | 9 s |" in told


def test_every_test_file_that_asks_for_a_gpu_is_run_there() -> None:
    found = set(files_for_gpus())
    assert {"tests/engine/test_gpu.py", "tests/execution/test_device_clock.py"} <= found
    assert "tests/sharding/context/test_kernels.py" in found
    assert not any(name.startswith("tests/gpu/") for name in found)
