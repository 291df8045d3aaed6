"""Jobs on a real Slurm: submitted, followed, stopped before their limit and queued again, cancelled, and lost nodes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from shardwise.cli import main
from shardwise.trace.journal import read_journal
from shardwise.trace.metrics import read_metrics
from tests.launch import site as slurm
from tests.launch.site import Site
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SLURM = ["launch", "--on", "slurm", "--device", "cpu"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    problem = slurm.missing()
    if problem is not None:
        pytest.skip(problem)
    with slurm.slurm_site(tmp_path_factory.mktemp("slurm")) as site:
        yield site


@pytest.fixture
def site(running: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The one Slurm of all tests, without jobs; commands here talk to it, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("SLURM_CONF", str(running.conf)), ("PYTHONPATH", str(ROOT / "src")), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    yield running
    running.clear()


def events(kind: str, folder: str = "run") -> list[Any]:
    return [each for each in read_journal(Path(folder)) if each["event"] == kind]


def until(is_so: Callable[[], Any], problem: str, seconds: float = 400) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        if time.monotonic() > deadline:
            log = "\n".join(path.read_text() for path in Path("run").glob("launch/*.out"))
            raise AssertionError(f"{problem}\n{log}")
        time.sleep(0.2)
    return found


def has_step(number: int) -> bool:
    return any(row["step"] >= number for row in read_metrics(Path("run")))


def losses() -> dict[int, float]:
    rows = [row for row in read_metrics(Path("run")) if "loss" in row]
    assert len(rows) == len({row["step"] for row in rows}), "a step is there twice"
    return {row["step"]: row["loss"] for row in rows}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--nodes 2 --partition shrt -- train tiny --plan dp=2",
            "error: unknown partition 'shrt'; known: short, closed\n  try: --partition short\n",
        ),
        (
            "--devices-per-node 1 -- train tiny --plan dp=8",
            "error: 8 nodes x 1 process are requested, and the partition short has 4 nodes\n"
            "  try: a plan for at most 4 devices, or another --partition\n",
        ),
        (
            "--device gpu --nodes 1 -- train tiny --plan dp=4",
            "error: 1 node x 4 GPUs are requested, and nodes of the partition short have 2 GPUs\n"
            "  try: --devices-per-node 2\n",
        ),
        (
            "--time 3h -- train tiny --plan dp=1",
            "error: 180 min are requested, and the partition short gives 60 min\n"
            "  try: --time 60min: the job is requeued, and continues from its checkpoint\n",
        ),
        (
            "--partition closed -- train tiny --plan dp=1",
            "error: the partition closed takes no jobs now\n  try: sinfo, which says what there is\n",
        ),
        (
            "--slurm=--nodelist=nowhere -- train tiny --plan dp=1",
            "error: sbatch refuses: allocation failure: Invalid node name specified\n"
            "  try: what it names, by --partition, --time, --nodes or --slurm OPTION\n",
        ),
    ],
)
def test_what_a_site_does_not_have_is_refused_before_anything_is_submitted(
    site: Site, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main([*SLURM, *words.split(), "--folder", "run"]) == 1
    assert capsys.readouterr().err == said
    assert not site.ask("squeue", "--noheader")
    assert not events("submitted")


def test_a_controller_that_does_not_answer_is_told(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    away = tmp_path / "away.conf"
    lines = [line for line in site.conf.read_text().splitlines() if not line.startswith("SlurmctldPort")]
    away.write_text("\n".join([*lines, "SlurmctldPort=1", "MessageTimeout=1"]))
    (tmp_path / "topology.conf").write_text((site.folder / "topology.conf").read_text())
    monkeypatch.setenv("SLURM_CONF", str(away))
    assert main([*SLURM, "--", "train", "tiny", "--plan", "dp=1", "--folder", "run"]) == 1
    assert capsys.readouterr().err == (
        "error: sinfo refuses: slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
        "  try: scontrol ping, which says whether it is up\n"
    )


def test_a_job_that_is_told_that_time_is_up_saves_is_queued_again_and_goes_on(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Slurm sends before the time limit is sent by hand here; the limit itself takes minutes, and is below."""
    problems = list[BaseException]()

    def tell() -> None:
        try:
            (submitted,) = until(lambda: events("submitted"), "nothing was submitted")
            until(lambda: has_step(4), "it does not train")
            site.ask("scancel", "--batch", "--signal=USR1", submitted["job"])
            until(lambda: site.job(submitted["job"])["JobState"] == "PENDING", "it is not queued again")
            site.start_now(submitted["job"])
        except BaseException as error:
            problems.append(error)

    teller = threading.Thread(target=tell)
    teller.start()
    words = [
        "--devices-per-node",
        "1",
        "--time",
        "10min",
        "--follow",
        "--json",
        "--",
        "train",
        "tiny",
        "--plan",
        "dp=2",
    ]
    # Copies in memory are for nodes that are lost; each node would keep a process on standby that has imported all.
    words += ["--copies-every", "0"]
    status = main([*SLURM, *words, "--set", "steps=240", "--set", "evaluation.every=0", "--folder", "run"])
    teller.join()
    if problems:
        raise problems[0]
    said = capsys.readouterr()
    assert status == 0, said.err
    told = json.loads(said.out)
    assert told["state"] == "COMPLETED"
    first, second = events("attempt")
    assert (first["restart"], second["restart"]) == (0, 1)
    assert [end["why"] for end in events("end")] == ["SIGUSR1", "finished"]
    stopped, start = events("end")[0]["step"], events("start")[1]["step"]
    assert stopped == start, "it went on where it had stopped"
    assert 4 <= start < 240, "and not from the beginning"
    assert sorted(losses()) == list(range(1, 241))
    places = events("start")[1]["places"]
    assert [place["rank"] for place in places] == [0, 1]
    # Both hang on one switch: that was asked for.
    assert {place["host"] for place in places} in ({"node1", "node2"}, {"node3", "node4"})
    assert "--switches=1@" in Path("run/launch/slurm.sh").read_text()
    assert "[" in said.err
    assert ": PENDING]" in said.err, "states are told while it is followed"


@pytest.mark.whole
def test_a_job_that_is_cancelled_has_saved(site: Site) -> None:
    assert main([*SLURM, "--", "train", "tiny", "--plan", "dp=1", "--set", "steps=20000", "--folder", "run"]) == 0
    number = events("submitted")[0]["job"]
    until(lambda: has_step(4), "it does not train")
    site.ask("scancel", number)
    until(lambda: site.job(number)["JobState"] == "CANCELLED", "it is not cancelled")
    (end,) = until(lambda: events("end"), "it has not ended")
    assert end["why"] == "SIGTERM"
    assert (Path("run/checkpoints") / f"step-{end['step']:08}").is_dir()


@pytest.mark.whole
def test_a_job_that_loses_a_node_goes_on_with_others(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices-per-node", "1", "--", "train", "tiny", "--plan", "dp=2", "--set", "steps=400"]
    assert main([*SLURM, *words, "--set", "checkpoint.every=10", "--set", "evaluation.every=0", "--folder", "run"]) == 0
    number = events("submitted")[0]["job"]
    until(lambda: has_step(20), "it does not train")
    (attempt,) = events("attempt")
    site.kill_node(attempt["nodes"][1])
    capsys.readouterr()
    until(lambda: site.job(number)["JobState"] == "PENDING", "the node is not missed")
    site.start_now(number)
    until(lambda: len(events("start")) > 1 and has_step(60), "it does not go on")
    assert main(["status", "run"]) == 0
    said = capsys.readouterr().out
    print(said)  # Seen with -s: the page about clusters shows it.
    assert said.startswith("run: running, step "), said
    assert f"\nslurm job {number}: running\n" in said
    assert f"lost {attempt['nodes'][1]} (down" in said
    until(lambda: site.job(number)["JobState"] == "COMPLETED", "it does not go on")
    last = events("attempt")[-1]
    assert attempt["nodes"][1] not in last["nodes"]
    assert last["after"].startswith(f"lost {attempt['nodes'][1]} (down")
    assert events("start")[-1]["step"] >= 10
    assert sorted(losses()) == list(range(1, 401))


@pytest.mark.whole
def test_the_limit_itself_makes_a_job_save_and_go_back_to_the_queue(site: Site) -> None:
    words = ["--time", "2min", "--save-before", "60s", "--", "train", "tiny", "--plan", "dp=1"]
    assert main([*SLURM, *words, "--set", "steps=200000", "--set", "evaluation.every=0", "--folder", "run"]) == 0
    number = events("submitted")[0]["job"]
    until(lambda: site.job(number)["JobState"] == "PENDING" and events("end"), "time is not up", 200)
    (end,) = events("end")
    assert end["why"] == "SIGUSR1"
    assert site.job(number)["Restarts"] == "1"


@pytest.mark.whole
def test_a_server_is_a_job_that_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_API_KEY", "key")
    assert main(["train", "tiny", "--devices", "1", "--set", "steps=1", "--folder", "trained"]) == 0
    port = free_port()
    assert main([*SLURM, "--folder", "run", "--", "serve", "trained", "--plan", "tp=1", "--port", str(port)]) == 0

    def health() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    until(health, "it does not answer")
    number = events("submitted")[0]["job"]
    site.ask("scancel", number)
    until(lambda: site.job(number)["JobState"] == "CANCELLED", "it is not cancelled")
    until(lambda: not health(), "it still answers")


@pytest.mark.whole
@pytest.mark.usefixtures("site")
def test_a_sweep_is_an_array_of_runs() -> None:
    words = ["--sweep", "optimizer.rate=1e-3,3e-3", "--follow", "--", "train", "tiny", "--plan", "dp=1"]
    assert main([*SLURM, *words, "--set", "steps=4", "--folder", "run"]) == 0
    for rate in ("1e-3", "3e-3"):
        assert [end["why"] for end in events("end", f"run/rate={rate}")] == ["finished"]
        assert f"rate = {float(rate)}" in Path(f"run/rate={rate}/recipe.toml").read_text()


#: Takes its time, and on the second node much of it: what else the machine does meanwhile is little beside that.
_SLOW_NODE = """
import os, time
from tests.training.own_models import Reader

class Slow(Reader):
    def forward(self, input_ids):
        time.sleep(0.6 if os.environ["SLURMD_NODENAME"] == "node2" else 0.15)
        return super().forward(input_ids)

make = Slow
"""


@pytest.mark.whole
def test_a_run_goes_on_without_the_node_whose_rank_stays_slow(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("slow_node.py").write_text(_SLOW_NODE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    words = ["--nodes", "2", "--", "train", "tiny", "--plan", "dp=2"]
    words += ["--set", "model.source=slow_node:make", "--set", "steps=120", "--set", "log=1"]
    assert main([*SLURM, *words, "--set", "evaluation.every=0", "--leave-out-slow", "--folder", "run"]) == 0
    moved = until(lambda: events("submitted")[1:], "it is not handed over anew")
    assert moved[0]["without"] == ["node2"]
    assert [(each["rank"], each["cause"]) for each in events("slow")] == [(1, "compute")]
    until(lambda: any(each["why"] == "finished" for each in events("end")), "it does not go on")
    first, last = events("start")
    assert [place["host"] for place in first["places"]] == ["node1", "node2"]
    assert "node2" not in [place["host"] for place in last["places"]]
    assert last["step"] > 0
    assert sorted(losses()) == list(range(1, 121))
    until(lambda: not site.ask("squeue", "--noheader"), "a job is left")
