"""How a run stands, told from journals as machines have left them."""

import json
import os
import socket
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.launch.run_status import status_of
from shardwise.trace.journal import JOURNAL, note, read_journal

PLACES = [{"rank": rank, "host": f"node{rank // 2}", "process": 1, "device": "cpu"} for rank in range(4)]


def test_ranks_hosts_restarts_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(tmp_path, "attempt", job="7", restart=0, nodes=["node0", "node1"])
    note(tmp_path, "start", step=0, plan="dp=4", places=PLACES)
    note(tmp_path, "end", step=40, why="SIGUSR1")
    note(tmp_path, "attempt end", status=0)
    note(tmp_path, "attempt", job="7", restart=1, nodes=["node0", "node1"])
    note(tmp_path, "start", step=40, plan="dp=4", places=PLACES)
    note(tmp_path, "attempt", job="7", restart=2, nodes=["node0", "node2"], after="lost node1 (down*)")
    note(tmp_path, "start", step=60, plan="dp=4", places=PLACES, source="memory")
    note(tmp_path, "copies", problem="the copy of step 62 did not reach node2: refused")
    note(tmp_path, "end", step=80, why="finished")
    (tmp_path / "checkpoints/step-00000080").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000100.saving").mkdir()
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}: finished\nlast checkpoint: step-00000080, saved ")
    assert "\n  node0: ranks 0 to 1 on cpu\n  node1: ranks 2 to 3 on cpu\nrestarted 2 times:\n" in said
    assert "\ncopies: the copy of step 62 did not reach node2: refused\n" in said
    assert " 60 (memory) " in said
    assert main(["status", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [start["why"] for start in told["starts"]] == ["SIGUSR1", "lost node1 (down*)", "finished"]
    assert told["num_restarts"] == 2


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "not started"),
        ([("start", {})], "lost"),
        ([("start", {}), ("end", {"why": "SIGTERM", "step": 3})], "stopped"),
        ([("start", {}), ("end", {"why": "finished", "step": 3})], "finished"),
        ([("start", {}), ("attempt end", {"status": 1})], "stopped"),
    ],
)
def test_the_state_of_a_run_that_nobody_trains(
    tmp_path: Path, events: list[tuple[str, dict[str, object]]], state: str
) -> None:
    (tmp_path / "recipe.toml").touch()
    for kind, facts in events:
        note(tmp_path, kind, **{"step": 0, "plan": "dp=1", **facts})
    assert status_of(tmp_path).state == state


def test_a_run_is_running_while_the_owner_of_its_lock_lives(tmp_path: Path) -> None:
    note(tmp_path, "start", step=0, plan="dp=1")
    owner = {"host": socket.gethostname(), "process": os.getpid()}
    (tmp_path / "lock").write_text(json.dumps(owner))
    assert status_of(tmp_path).state == "running"
    (tmp_path / "lock").write_text(json.dumps({**owner, "process": 2**22 + 1}))
    assert status_of(tmp_path).state == "lost"


def test_a_journal_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    note(tmp_path, "start", step=0, plan="dp=1")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"event": "end", "wh')
    assert [each["event"] for each in read_journal(tmp_path)] == ["start"]
    note(tmp_path, "attempt")
    assert [each["event"] for each in read_journal(tmp_path)] == ["start", "attempt"]
    note(tmp_path / "nowhere", "start")  # A run does not end because its journal cannot be written.


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == (
        f"error: there is no run at {tmp_path / 'none'}\n  try: the --folder of shardwise train or launch\n"
    )


def test_slow_ranks_wrong_numbers_and_hosts_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(tmp_path, "start", step=0, plan="dp=4", places=PLACES)
    note(tmp_path, "slow", step=40, rank=2, host="node1", cause="data", seconds=0.4, others_seconds=0.001, looks=4)
    note(tmp_path, "corrupt", step=44, ranks=[1], hosts=["node0"], what="rank 1 on node0 had computed other gradients")
    note(tmp_path, "end", step=50, why="rank 2 is slow (data)", leave_out=["node1"])
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "slow: rank 2 on node1 since 20" in said
    assert ", by data: 400 ms of a step, others 1 ms\n" in said
    assert "wrong numbers: step 44: rank 1 on node0 had computed other gradients\n" in said
    assert "left out: node1\n" in said
    assert main(["status", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["slow"][0]["rank"], told["left_out"]) == (2, ["node1"])
