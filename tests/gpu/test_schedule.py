"""The pieces of the tests on GPUs are all of them, each begins where there is room, and what was said is kept."""

import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu import commands, faults, files, pieces
from tests.gpu.__main__ import MODULES, Found, summary
from tests.gpu.every_plan import wanted_rows
from tests.gpu.files import files_for_gpus, groups
from tests.gpu.pieces import MOST_RANKS, QUEUES, Piece, Room, run_at_once
from tests.gpu.record import Record
from tests.gpu.schedule import BOTH, COUNTS, PARTS, is_done, rows_of, seconds_of
from tests.gpu.schedule import pieces as all_pieces
from tests.ranks.processes import are_gone


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_something_that_can_be_run(part: str) -> None:
    known = {"plans", "families", "faults", "commands", "pytest"}
    assert part in known or find_spec(f"tests.gpu.{MODULES[part]}") is not None


def test_the_pieces_that_run_beside_each_other_are_all_of_it_and_each_thing_is_in_one() -> None:
    every = all_pieces(PARTS)
    assert {each.part for each in every} == set(PARTS)
    names = [name for each in every for name in rows_of(each)]
    assert len(set(names)) == len(names)
    expected = {
        *(f"pytest: {name}" for name in files_for_gpus()),
        *(f"commands: {case.name}" for case in commands.wanted()),
        *(f"faults: {name}" for name in faults.names()),
        *("nccl: nccl", "input: input"),
    }
    for with_families in (False, True):
        rows = wanted_rows(with_families=with_families, counts=COUNTS, precisions=BOTH)
        expected |= {row.name for row in rows}
    assert set(names) == expected
    assert len({each.log for each in every}) == len(every)


def test_no_piece_is_longer_than_a_call_and_what_wants_all_of_the_gpu_is_last() -> None:
    every = all_pieces(PARTS, 16)
    assert max(seconds_of(each) for each in every) < 480
    assert every[0].processes == 8
    assert (every[-1].processes, every[-1].values("--files")) == (16, (files.WHOLE_GPU,))


def test_a_piece_is_begun_until_the_record_has_all_of_it(tmp_path: Path) -> None:
    record, every = Record(tmp_path / "record"), all_pieces(PARTS)
    assert not any(is_done(each, record) for each in every)
    rows = wanted_rows(with_families=False, counts=[4], precisions=BOTH)
    for row in rows[1:]:
        record.add(row.name, {})
    record.add("nccl: nccl", {"status": 0})
    record.add("pytest: tests/engine/test_gpu.py", {"status": 0})
    assert {each.name for each in every if is_done(each, record)} == {"nccl", "pytest tests/engine/test_gpu.py"}
    four = next(each for each in every if each.name == "plans 4")
    assert seconds_of(four, record) < seconds_of(four) / 2
    record.add(rows[0].name, {})
    assert is_done(four, record)


def test_short_files_share_a_process_and_others_do_not() -> None:
    recorded = {"long": 100.0, "a": 50.0, "b": 30.0, "c": 20.0} | {f"short {number}": 12.0 for number in range(8)}
    names = [*recorded, files.WHOLE_GPU, *files.RANKS]
    found = groups(names, recorded)
    assert sorted(name for group in found for name in group) == sorted(names)
    assert all([name] in found for name in ("long", files.WHOLE_GPU, *files.RANKS))
    shared = [group for group in found if len(group) > 1]
    assert shared
    assert max(files.seconds_of(group, recorded) for group in found if "long" not in group) <= 50.0


def test_there_is_room_for_so_many_processes_and_for_so_many_ranks() -> None:
    room = Room(16, MOST_RANKS * QUEUES)
    ranks, single, whole = Piece("plans", 12), Piece("pytest", 1, are_ranks=False), Piece("pytest", 16)
    waiting = [ranks, Piece("plans", 4), single, single, single, whole]
    taken = [room.take(waiting) for _ in range(4)]
    assert taken == [ranks, single, single, single]
    assert waiting == [Piece("plans", 4), whole]
    room.give(ranks)
    assert room.take(waiting) == Piece("plans", 4)

    def give_all() -> None:
        for each in (single, single, single, Piece("plans", 4)):
            room.give(each)

    later = threading.Timer(0.05, give_all)
    later.start()
    assert room.take(waiting) == whole
    later.join()


def test_what_is_not_over_when_the_time_is_up_is_ended_and_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho begun $*\nsleep 60 & echo $! > {tmp_path}/pid; wait\n", encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(pieces, "LOGS", tmp_path / "logs")
    piece = Piece("plans", 2, ("--ranks", "2"))
    run_at_once([piece], Room(2, 64), tmp_path / "record", 3.0, needs=lambda _: 0.0)
    assert "ended before it was over" in capfd.readouterr().out
    assert "begun -m tests.gpu --only plans --ranks 2" in (tmp_path / "logs" / "plans_2.log").read_text()
    assert are_gone([int((tmp_path / "pid").read_text())], seconds=10)


def test_what_has_no_time_is_not_begun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_at_once([Piece("plans", 2)], Room(2, 64), tmp_path / "record", 5.0, needs=lambda _: 6.0)
    assert capfd.readouterr().out == ""


def test_a_record_has_what_several_processes_wrote(tmp_path: Path) -> None:
    one, other = Record(tmp_path / "record"), Record(tmp_path / "record")
    one.add("plans: a", {"problem": None})
    other.add("plans: b", {"problem": "gone"})
    assert list(one.rows) == ["plans: a"]
    one.read()
    assert one.of("plans") == [{"problem": None}, {"problem": "gone"}]
    assert Record(tmp_path / "record", anew=True).rows == {}


@pytest.mark.parametrize("torn", [b'{"name": "plans: b", "ro', b'{"name": "\xc3', b"{"])
def test_half_a_line_of_a_process_that_was_killed_is_no_result_and_spoils_none(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "record"
    Record(path).add("plans: a", {"problem": None})
    with path.open("ab") as file:
        file.write(torn)
    record = Record(path)
    assert list(record.rows) == ["plans: a"]
    record.add("plans: c", {"problem": None})
    assert list(Record(path).rows) == ["plans: a", "plans: c"]


def test_what_failed_is_named_at_the_end_and_fills_no_page() -> None:
    problem = "x" * 5000
    found = {
        "plans": Found(2, [f"bf16 dp=2 (tied): {problem}"], []),
        "pytest": Found(1, ["tests/a.py: status 1"], [f"tests/{number}.py" for number in range(100)]),
    }
    told = summary(found, 12.0)
    assert told.splitlines()[:3] == [
        "plans: 2 passed, 1 failed, 0 left out",
        "pytest: 1 passed, 1 failed, 100 left out",
        "12 s",
    ]
    assert "  and 60 more" in told
    assert told.splitlines()[-3] == "FAILED: 2"
    assert told.splitlines()[-1] == "  pytest: tests/a.py: status 1"
    assert len(told) < 4000
