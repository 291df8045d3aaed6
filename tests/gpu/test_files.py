"""Many test files in one process: each is recorded by itself, whatever another does to the process."""

import math
import time
from pathlib import Path

import pytest

from tests.gpu import files
from tests.gpu.files import run_files
from tests.gpu.record import ROOT, Record

GOOD = "def test_it() -> None:\n    pass\n"
BAD = "def test_it() -> None:\n    assert False\n"
DIES = "import os\ndef test_it() -> None:\n    os._exit(9)\n"


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deadline: float = math.inf, **texts: str
) -> dict[str, dict[str, float | str]]:
    """What the record has of some files that are run together."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    (folder / "some").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "some" / f"test_{name}.py").write_text(text, encoding="utf-8")
    record = Record(folder / "record", known={})
    run_files(record, [f"some/test_{name}.py" for name in texts], deadline, root=folder)
    assert Record(folder / "record", known={}).rows == record.rows
    return {name.removeprefix("pytest: some/test_").removesuffix(".py"): row for name, row in record.rows.items()}


def test_each_file_is_recorded_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import time\ndef test_it() -> None:\n    time.sleep(0.3)\n"
    skipped = "import pytest\n@pytest.mark.skip(reason='no GPU')\n" + GOOD
    broken = "import nothing_of_this_name\n" + GOOD
    found = recorded(tmp_path, monkeypatch, good=GOOD, bad=BAD, slow=slow, skipped=skipped, broken=broken, empty="")
    assert {name: row["status"] for name, row in found.items()} == {
        "good": 0, "bad": 1, "slow": 0, "skipped": 0, "broken": 2, "empty": 5,
    }  # fmt: skip
    assert 0.3 <= float(found["slow"]["seconds"]) < 5
    assert not any("since" in row for row in found.values())


def test_a_file_that_ends_its_process_has_failed_and_those_behind_it_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(tmp_path, monkeypatch, before=GOOD, dies=DIES, behind=BAD, last=GOOD)
    assert {name: row["status"] for name, row in found.items()} == {"before": 0, "dies": 9, "behind": 1, "last": 0}


def test_a_file_that_ends_the_process_that_reads_it_has_failed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(tmp_path, monkeypatch, good=GOOD, dies="import os\nos._exit(7)\n")
    assert {name: row["status"] for name, row in found.items()} == {"good": 0, "dies": 7}


def test_a_file_that_fails_beside_others_alone_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "import sys\ndef test_it() -> None:\n    sys.left_behind = True\n"
    minds = "import sys\ndef test_it() -> None:\n    assert not hasattr(sys, 'left_behind')\n"
    found = recorded(tmp_path, monkeypatch, sets=sets, minds=minds)
    assert (found["sets"]["status"], found["minds"]["status"]) == (0, 0)
    assert found["minds"]["since"] == "failed beside other files in one process, passed alone"


def test_a_file_that_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded(tmp_path, monkeypatch, one=GOOD)["one"]["status"] == 0
    found = recorded(tmp_path, monkeypatch, one=DIES, other=GOOD)
    assert {name: row["status"] for name, row in found.items()} == {"one": 0, "other": 0}


def test_what_there_is_no_time_for_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded(tmp_path, monkeypatch, time.monotonic() + 5.0, one=GOOD) == {}
    monkeypatch.setattr(files, "_LEAST_SECONDS", 0.0)
    late = "import time\ndef test_it() -> None:\n    time.sleep(1)\n"
    texts = dict.fromkeys((f"number_{number}" for number in range(30)), late)
    found = recorded(tmp_path, monkeypatch, time.monotonic() + 6.0, **texts)
    assert len(found) < 30
    assert all(row["status"] == 0 for row in found.values())


def test_the_settings_of_pytest_hold_as_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one name in two folders can be read, and a warning is an error."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    settings = '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\nfilterwarnings = ["error"]\n'
    (tmp_path / "pyproject.toml").write_text(settings, encoding="utf-8")
    warns = "import warnings\ndef test_it() -> None:\n    warnings.warn('old')\n"
    names = ["one/test_gpu.py", "two/test_gpu.py", "two/test_warns.py"]
    for name, text in zip(names, (GOOD, GOOD, warns), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    record = Record(tmp_path / "record", known={})
    run_files(record, names, math.inf, root=tmp_path)
    assert [record.rows[f"pytest: {name}"]["status"] for name in names] == [0, 0, 1]
