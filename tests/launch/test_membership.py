"""Hosts that are lost, that are slow and that come back, and ranks placed on them. Hosts are processes of this machine
that a script in the place of ssh starts, each with an address of its own."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.launch import at_node, membership
from shardwise.trace.journal import note, read_journal
from shardwise.trace.metrics import read_metrics
from tests.ports import free_port

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


@pytest.mark.parametrize(("least", "said"), [("0", "--least-hosts 0: from 1 to the 4 that are named")])
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
