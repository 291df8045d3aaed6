"""Hosts that are lost, that are slow and that come back, and ranks placed on them. Hosts are processes of this machine
that a script in the place of ssh starts, each with an address of its own."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.launch import at_node, membership
from shardwise.trace.journal import hosts_back, note, read_journal
from shardwise.trace.metrics import read_metrics
from tests.ports import free_port
from tests.training.programs import STEADY

ROOT = Path(__file__).parents[2]
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
FOUR = (*HOSTS, "127.0.0.4")

SSH = """#!/bin/bash
# [-tt] HOST COMMAND: a host that is down says so as ssh does.
[ "$1" = -tt ] && shift
[ -e "{folder}/$1.down" ] && exit 255
[ "$2" = true ] || echo $$ >"{folder}/$1.process"
exec bash -c "$2"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(membership, "_PAUSE_SECONDS", 0.0)
    (tmp_path / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o700)
    return str(tmp_path / "ssh")


def attempts() -> list[Any]:
    return [each for each in read_journal(Path("run")) if each["event"] == "attempt"]


def test_who_does_not_answer_is_left_out_and_who_comes_back_takes_part(ssh: str) -> None:
    run = Path("run")
    assert at_node.begin_on(run, HOSTS, "7", 0, ssh=ssh, least=1)[1] == list(HOSTS)
    Path("127.0.0.2.down").touch()
    assert at_node.begin_on(run, HOSTS, "7", 1, ssh=ssh, least=2)[1] == ["127.0.0.1", "127.0.0.3"]
    assert attempts()[-1]["after"] == "127.0.0.2 does not answer"
    with pytest.raises(ShardwiseError, match=r"2 hosts of 3 can take part, and --least-hosts is 3: 127.0.0.2 does not"):
        at_node.begin_on(run, HOSTS, "7", 2, ssh=ssh, least=3)
    Path("127.0.0.2.down").unlink()
    assert at_node.begin_on(run, HOSTS, "7", 2, ssh=ssh, least=3)[1] == list(HOSTS)


def test_a_host_that_was_slow_is_left_out_until_the_run_is_launched_anew(ssh: str) -> None:
    run = Path("run")
    at_node.begin_on(run, HOSTS, "7", 0, ssh=ssh, least=1)
    note(run, "start")
    note(run, "end", why="rank 1 is slow", leave_out=["127.0.0.2"])
    assert at_node.end(run, 75, nodes=HOSTS) == "again"
    assert at_node.begin_on(run, HOSTS, "7", 1, ssh=ssh, least=1)[1] == ["127.0.0.1", "127.0.0.3"]
    assert attempts()[-1]["after"] == "127.0.0.2 is left out as it was slow"
    at_node.begin_on(run, HOSTS, "8", 0, ssh=ssh, least=1)
    assert at_node.begin_on(run, HOSTS, "8", 1, ssh=ssh, least=1)[1] == list(HOSTS)


def test_where_no_other_host_is_left_it_is_over(ssh: str) -> None:
    run = Path("run")
    at_node.begin_on(run, HOSTS[:1], "7", 0, ssh=ssh, least=1)
    note(run, "start")
    note(run, "end", why="rank 0 is slow", leave_out=["127.0.0.1"])
    assert at_node.end(run, 75, nodes=HOSTS[:1]) == "over"


def test_a_host_with_which_no_ranks_start_is_left_out_and_the_others_go_on(ssh: str) -> None:
    run = Path("run")
    at_node.begin_on(run, HOSTS, "7", 0, ssh=ssh, least=1)
    assert at_node.end(run, 1, nodes=HOSTS) == "over", "nothing has ever started"
    Path("127.0.0.2.down").touch()
    at_node.begin_on(run, HOSTS, "7", 1, ssh=ssh, least=1)
    note(run, "start")
    Path("127.0.0.2.down").unlink()
    assert at_node.begin_on(run, HOSTS, "7", 2, ssh=ssh, least=1)[1] == list(HOSTS)
    assert at_node.end(run, 1, nodes=HOSTS) == "again"
    assert at_node.begin_on(run, HOSTS, "7", 3, ssh=ssh, least=1)[1] == ["127.0.0.1", "127.0.0.3"]
    assert attempts()[-1]["after"] == "127.0.0.2 is left out as ranks failed with it"
    at_node.begin_on(run, HOSTS, "8", 0, ssh=ssh, least=1)
    assert at_node.end(run, 1, nodes=HOSTS) == "over", "launched anew, it is another question"


def test_a_host_that_is_back_is_told_of_once_it_could_take_part(
    ssh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that are away one comes back with other versions, which are mended; the other was slow."""
    run, mark = Path("run"), at_node.write_mark(Path("run"))
    Path("127.0.0.2.down").touch()
    note(run, "end", why="rank 3 is slow", leave_out=["127.0.0.4"])
    note(run, "start")
    looks: list[tuple[str, ...]] = []

    def sleep(_: float) -> None:
        looks.append(hosts_back(read_journal(run)))
        Path("127.0.0.2.down").unlink(missing_ok=True)
        Path("versions").write_text("1" if len(looks) < 3 else "2")

    monkeypatch.setattr(membership, "time", SimpleNamespace(sleep=sleep))
    # What a host tells of itself, without starting Python: the file is what its versions are.
    told = '{"node": "?", "is_shared": true, "versions": {"torch": "\'$v\'"}}'
    report = f"v=$(if [ $(cat host) = {HOSTS[0]} ]; then echo 2; else cat versions; fi); echo '{told}' #"
    Path("ssh").write_text(SSH.format(folder=Path.cwd()).replace("exec", 'echo "$1" >host; exec'))
    at_node.watch(run, FOUR, (HOSTS[0], HOSTS[2]), "7", mark, ssh=ssh, report=report)
    assert looks == [(), (), ()]
    assert hosts_back(read_journal(run)) == ("127.0.0.2",)
    said = capsys.readouterr().err
    assert said.count("127.0.0.2 is back, and cannot take part: nodes have different versions of torch") == 1
    note(run, "end", why="127.0.0.2 can take part again", take_in=["127.0.0.2"])
    assert at_node.end(run, 75, nodes=HOSTS) == "more"
    note(run, "start")
    assert hosts_back(read_journal(run)) == (), "of the last start alone"


def launch(ssh: str, *words: str) -> list[str]:
    hosts = ["--hosts", ",".join(FOUR), "--port", str(free_port()), "--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS"]
    return ["launch", "--on", "hosts", "--device", "cpu", "--ssh", ssh, *hosts, *words]


#: Of four devices 0 and 2 are neighbours, and 1 and 3.
FABRIC = """
[[pool]]
device = "cpu"
num_nodes = 4
devices_per_node = 1
[pairs]
hosts = ["127.0.0.3", "127.0.0.1", "127.0.0.2", "127.0.0.4"]
devices = ["cpu:0", "cpu:0", "cpu:0", "cpu:0"]
bytes_per_second = [[0, 1e7, 1e9, 1e7], [1e7, 0, 1e7, 1e9], [1e9, 1e7, 0, 1e7], [1e7, 1e9, 1e7, 0]]
latency_seconds = [[0, 1e-3, 1e-5, 1e-3], [1e-3, 0, 1e-3, 1e-5], [1e-5, 1e-3, 0, 1e-3], [1e-3, 1e-5, 1e-3, 0]]
"""


def test_ranks_are_placed_as_a_probe_has_numbered_the_hosts(ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fabric.toml").write_text(FABRIC)
    words = launch(ssh, "--cluster", "fabric.toml", "--show", "--json", "--", "train", "tiny", "--plan", "dp=4")
    assert main([*words, "--folder", "run"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert "--nodes '127.0.0.3 127.0.0.1 127.0.0.2 127.0.0.4'" in text
    assert "--cluster fabric.toml" in text
    assert main([*words, "--cluster", "fabric.toml", "--folder", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].count("--cluster fabric.toml") == 2, "its own, in two places"


@pytest.mark.parametrize(
    ("least", "said"), [("0", "--least-hosts 0: it must be from 1 to 4, the number of hosts named")]
)
def test_the_least_is_among_the_hosts(ssh: str, capsys: pytest.CaptureFixture[str], least: str, said: str) -> None:
    assert main(launch(ssh, "--least-hosts", least, "--", "train", "tiny", "--plan", "dp=4")) == 1
    assert said in capsys.readouterr().err


def wait_until(what: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, Path("run/launch/hosts.out").read_text()
        time.sleep(0.1)


def told(kind: str) -> list[Any]:
    return [each for each in read_journal(Path("run")) if each["event"] == kind]


@pytest.mark.whole
def test_a_run_loses_a_host_and_goes_on_with_the_others_and_its_ranks_sit_where_the_placer_says(
    ssh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fabric.toml").write_text(FABRIC)
    recipe = ["batch=12", "steps=100", "checkpoint.every=5", "evaluation.every=0", "model.layers=3"]
    words = ["train", "tiny", "--plan", "dp=2,tp=2", *(word for each in recipe for word in ("--set", each))]
    assert main([*launch(ssh, "--cluster", "fabric.toml"), "--", *words, "--folder", "run"]) == 0
    try:
        wait_until(lambda: any(row["step"] >= 10 for row in read_metrics(Path("run"))))
        placed = [place["host"] for place in told("start")[0]["places"]]
        assert [{*placed[:2]}, {*placed[2:]}] == [{"127.0.0.3", "127.0.0.2"}, {"127.0.0.1", "127.0.0.4"}]
        Path("127.0.0.2.down").touch()
        os.kill(int(Path("127.0.0.2.process").read_text()), signal.SIGKILL)
        wait_until(lambda: "finished" in [each["why"] for each in told("end")])
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(told("submitted")[0]["job"]), signal.SIGTERM)
    assert {place["host"] for place in told("start")[-1]["places"]} == {"127.0.0.3", "127.0.0.1", "127.0.0.4"}
    losses = [row for row in read_metrics(Path("run")) if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, 101))
    capsys.readouterr()
    assert main(["status", "run"]) == 0
    assert "127.0.0.2 does not answer" in capsys.readouterr().out


@pytest.mark.whole
def test_a_host_that_comes_back_takes_part_from_the_next_checkpoint_on(ssh: str) -> None:
    """Nothing of the run is in the memory of the host that came back, and no copies are made: all comes from disk."""
    entries = {**STEADY, "batch": 12, "checkpoint.every": 10, "log": 1}
    sets = [word for key, value in entries.items() for word in ("--set", f"{key}={value}")]
    words = ["train", "tiny", "--plan", "dp=4,zero=1", "--copies-every", "0", *sets]
    # One failure is all that there may be: to grow is none.
    wild = [*words, "--set", "steps=1000000", "--folder", "run"]
    assert main([*launch(ssh, "--restarts", "1"), "--", *wild]) == 0
    try:
        wait_until(lambda: any(row["step"] >= 11 for row in read_metrics(Path("run"))))
        Path("127.0.0.2.down").touch()
        os.kill(int(Path("127.0.0.2.process").read_text()), signal.SIGKILL)
        wait_until(lambda: len(told("start")) > 1)
        Path("127.0.0.2.down").unlink()
        wait_until(lambda: len(told("start")) > 2)
        grown = told("start")[2]["step"]
        wait_until(lambda: any(row["step"] >= grown + 5 for row in read_metrics(Path("run"))))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(told("submitted")[0]["job"]), signal.SIGTERM)
    wait_until(lambda: told("end")[-1]["why"] == "SIGTERM")
    starts = told("start")
    assert [each["plan"] for each in starts] == ["dp=4,zero=1", "dp=3,zero=1", "dp=4,zero=1"]
    assert [each.get("source") for each in starts] == [None, "disk", "disk"]
    assert [each["step"] for each in told("end") if each.get("take_in") == ["127.0.0.2"]] == [grown]
    assert grown % 10 == 0, "at a checkpoint that was due, and for no other"
    losses = [row["loss"] for row in read_metrics(Path("run")) if "loss" in row]
    assert main([*words, "--set", f"steps={len(losses)}", "--folder", "calm"]) == 0
    assert losses == pytest.approx([row["loss"] for row in read_metrics(Path("calm")) if "loss" in row], rel=1e-5)
