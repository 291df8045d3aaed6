"""On this machine and on hosts over a real ssh: what is refused, what is written, and a run from beginning to end."""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.launch import at_node, command
from shardwise.launch.option_checks import ONLY_ON
from shardwise.launch.work import read_work
from shardwise.trace.journal import note, read_journal
from shardwise.trace.metrics import read_metrics
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
LOCAL = ["launch", "--on", "local", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def whys(folder: str = "run") -> list[Any]:
    return [each["why"] for each in read_journal(Path(folder)) if each["event"] == "end"]


def text_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words[:1], "--show", "--json", *words[1:]]) == 0
    text: str = json.loads(capsys.readouterr().out)["text"]
    return text


# What is written.


@pytest.mark.parametrize("on", [["local"], ["slurm", "--time", "1h"], ["hosts", "--hosts", "a,b"]])
def test_a_script_is_one_that_bash_understands_and_no_word_becomes_a_command(
    here: Path, capsys: pytest.CaptureFixture[str], on: list[str]
) -> None:
    words = [
        "--",
        "train",
        "tiny",
        "--plan",
        "dp=2",
        "--set",
        "name=$(touch bad)`touch bad`\ntouch bad",
        "--folder",
        "a b",
    ]
    text = text_of(["launch", "--on", *on, *words], capsys)
    script = here / "script.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    # All but the words of the run are commands that do nothing here.
    names = ("srun", "scontrol", "ssh", "at_node", "exec", "cd", "sed")
    quiet = "\n".join(f"{name}() {{ :; }}" for name in names)
    script.write_text(text.replace("set -uo pipefail", quiet).replace(f"python={sys.executable}", "python=:"))
    subprocess.run(["bash", script], check=False, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert not (here / "bad").exists()


def test_a_sweep_names_each_run_after_what_it_changes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here.is_dir()
    words = [
        "--sweep",
        "optimizer.rate=1e-3,3e-3",
        "--sweep",
        "model.width=32,64",
        "--",
        "train",
        "tiny",
        "--plan",
        "dp=1",
        "--folder",
        "s",
    ]
    text = text_of(["launch", "--on", "slurm", *words], capsys)
    assert "#SBATCH --array=0-3" in text
    assert "3) folder=s/rate=3e-3,width=64 changes=(--set optimizer.rate=3e-3 --set model.width=64) ;;" in text


@pytest.mark.parametrize("on", [["local"], ["hosts", "--hosts", "a,b"]])
def test_torchrun_waits_for_ranks_that_save(here: Path, capsys: pytest.CaptureFixture[str], on: list[str]) -> None:
    assert here.is_dir()
    text = text_of(["launch", "--on", *on, "--save-before", "5min", "--", "train", "tiny", "--plan", "dp=2"], capsys)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 " in text


def test_nodes_and_devices_come_from_the_plan_and_the_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "plan.toml").write_text("dp = 4\ntp = 4\n")
    words = ["--cluster", "8x8xh100", "--", "train", "tiny", "--set", "model.heads=4", "--plan", "plan.toml"]
    text = text_of(["launch", "--on", "slurm", *words], capsys)
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "--plan dp=4,tp=4 " in text, "the plan travels in its short form, and not as a file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--on local", "error: nothing is said to be started\n  try: -- train RECIPE, or -- serve MODEL\n"),
        ("--on local -- trian tiny", "error: 'trian' cannot be launched; train and serve can\n  try: -- train ...\n"),
        (
            "--on local -- train tiny --stpes 4",
            "error: unknown option '--stpes'; known: --help, --plan, --devices, --cluster, --share-gpus, --set,"
            " --folder, --verify-steps, --leave-out-slow, --metrics-port, --metrics-host, --metrics-file,"
            " --copies-every, --show, --json\n  try: --set\n",
        ),
        (
            "--on local -- train tiny --show",
            "error: --show stands after the --\n  try: shardwise launch --show ... -- train\n",
        ),
        (
            "--on local -- train tiny",
            "error: the number of devices per node is not given\n"
            "  try: --devices-per-node 8, --cluster 2x8xh100, or a --plan\n",
        ),
        (
            "--on slurm --nodes 1 --devices-per-node 2 -- train tiny --plan dp=4",
            "error: the plan dp=4 is for 4 devices, and 1 node x 2 GPUs are 2\n  try: --nodes 2 --devices-per-node 2\n",
        ),
        (
            "--on slurm --cluster 2x8xh100 -- train tiny --plan dp=32",
            "error: 4 nodes x 8 GPUs are 32 devices, and 2x8xh100-80g has 16\n"
            "  try: a plan for 16 devices: shardwise plan MODEL 2x8xh100-80g --save plan.toml\n",
        ),
        (
            "--on slurm --devices-per-node 4 -- serve model --plan tp=8",
            "error: serve runs on one node, and 2 nodes x 4 GPUs are requested\n"
            "  try: a plan of at most 4 ranks; --replicas on Kubernetes serves more requests\n",
        ),
        (
            "--on local -- serve model --api-key secret",
            "error: an --api-key would be in the script, where everyone can read it\n"
            "  try: export SHARDWISE_API_KEY=KEY\n",
        ),
        ("--on hosts -- train tiny --plan dp=2", "error: no hosts are named\n  try: --hosts A,B\n"),
        (
            "--on slurm --time 1min --save-before 2min -- train tiny --plan dp=1",
            "error: --save-before 2min is not before the end of --time 1min\n  try: --save-before 15s\n",
        ),
        (
            "--on local --save-before 0.1s -- train tiny --plan dp=1",
            "error: --save-before 0.1s: ranks need time to save\n  try: --save-before 2min\n",
        ),
        (
            "--on local --sweep steps=1,2 -- train tiny --plan dp=1",
            "error: --sweep is an array of trainings on Slurm\n  try: --on slurm ... -- train\n",
        ),
        (
            "--on kubernetes --image shardwise:latest -- train tiny --plan dp=1",
            "error: --image shardwise:latest is not named by a digest, so nodes could run different ones\n"
            "  try: --image REPOSITORY@sha256:..., as docker push prints it\n",
        ),
        (
            f"--on kubernetes --image r@sha256:{'0' * 64} -- train tiny --plan dp=1",
            "error: pods share no folder, so a run that is started again would find no checkpoint\n"
            "  try: --claim with a PersistentVolumeClaim that all nodes can mount (ReadWriteMany)\n",
        ),
        (
            f"--on kubernetes --image r@sha256:{'0' * 64} -- serve model --plan tp=2",
            "error: a server that others can reach needs an API key\n"
            "  try: --secret NAME, made by: kubectl create secret generic NAME --from-literal=key=...\n",
        ),
        (
            "--on local --partition gpu -- train tiny --plan dp=1",
            "error: --partition is for --on slurm, and this is --on local\n"
            "  try: leave --partition out, or --on slurm\n",
        ),
        (
            "--on hosts --hosts a,b --cpus 4 -- train tiny --plan dp=2",
            "error: --cpus is for --on slurm or kubernetes, and this is --on hosts\n"
            "  try: leave --cpus out, or --on slurm\n",
        ),
        (
            "--on slurm --cpus 0 -- train tiny --plan dp=1",
            "error: --cpus 0: it must be at least 1\n  try: leave --cpus out\n",
        ),
        (
            "--on local --port 99999 -- train tiny --plan dp=1",
            "error: --port 99999: ports are from 1 to 65535\n  try: leave --port out\n",
        ),
        (
            "--on slurm --devices-per-node 7 -- train tiny --plan tp=7",
            "error: layers.0.attention.q_proj, layers.0.attention.k_proj, layers.0.attention.v_proj and"
            " layers.0.attention.o_proj can be split into 2 pieces (heads or channels), fewer than tp=7\n  try: tp=2\n",
        ),
        (
            "--on hosts --hosts a,b,c -- train tiny --plan dp=3",
            "error: a batch of 8 rows cannot be divided evenly under dp=3\n  try: --set batch=6 or --set batch=9\n",
        ),
        (
            "--on local -- train tiny --plan dp=2,ep=2",
            "error: Transformer has no experts for ep=2 to share out: none were found\n  try: ep=1\n",
        ),
        (
            "--on local -- train tiny --plan pp=2,layers=1+5",
            "error: the cut 1, 5 adds up to 6, but there are 5 units, 2 of them blocks\n"
            "  try: layers=3+2 (units: embed, layers.0, layers.1, norm, head)\n",
        ),
        (
            "--on slurm --sweep batch=8,9 -- train tiny --plan dp=2 --folder s",
            "error: a batch of 9 rows cannot be divided evenly under dp=2\n  try: --set batch=8 or --set batch=10\n",
        ),
        (
            "--on local -- serve qwen3-0.6b --random-weights --plan tp=7",
            "error: tp=7 does not divide 16 heads\n  try: tp=4\n",
        ),
        (
            "--on local --env A-B=1 -- train tiny --plan dp=1",
            "error: --env A-B=1: 'A-B' is not the name of a variable\n  try: --env NAME=VALUE\n",
        ),
        (
            "--on local --python no/python -- train tiny --plan dp=1",
            "error: --python no/python cannot be run here\n  try: leave --python out\n",
        ),
        (
            "--on hosts --hosts a,b,a -- train tiny --plan dp=3",
            "error: --hosts names a twice, and each host is one node\n"
            "  try: --hosts a,b, with --devices-per-node for more ranks\n",
        ),
        (
            "--on slurm --time soon -- train tiny --plan dp=1",
            "error: --time soon: 'soon' is not a time\n  try: --time 4h\n",
        ),
        (
            "--on slurm --sweep optimizer.rate=fast -- train tiny --plan dp=1",
            "error: --sweep optimizer.rate=fast: optimizer.rate in --sweep wants a number, and is 'fast'\n"
            "  try: optimizer.rate=0.1\n",
        ),
        (
            "--on slurm --sweep steps=1,1 -- train tiny --plan dp=1 --folder s",
            "error: two runs of the sweep would share the folder s/steps=1\n  try: each value once\n",
        ),
        (
            "--on slurm --sweep steps=1 --sweep steps=2 -- train tiny --plan dp=1 --folder s",
            "error: --sweep names steps twice\n  try: --sweep steps=A,B with all of its values\n",
        ),
        (
            f"--on kubernetes --image r@sha256:{'0' * 64} --claim Runs -- train tiny --plan dp=1",
            "error: --claim Runs: names in Kubernetes have lowercase letters, digits, '-' and '.'\n"
            "  try: kubectl get persistentvolumeclaims -A\n",
        ),
        (
            f"--on kubernetes --image r@sha256:{'0' * 64} --claim runs --memory 64GB -- train tiny --plan dp=1",
            "error: --memory 64GB is not a quantity of Kubernetes\n  try: --memory 512Gi\n",
        ),
        (
            "--on slurm -- serve model --plan dp=1",
            "error: the server listens on 0.0.0.0, where other machines can reach it, and there is no API key\n"
            "  try: export SHARDWISE_API_KEY=KEY\n",
        ),
    ],
)
def test_a_wrong_call_is_a_sentence(here: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(["launch", *words.split()]) != 0
    assert capsys.readouterr().err == said
    assert not list(here.iterdir()), "nothing was written"


def test_where_there_is_no_slurm_and_no_kubectl_that_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert main(["launch", "--on", "slurm", "--", "train", "tiny", "--plan", "dp=1"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no Slurm here: sbatch is not found\n"
        "  try: a login node of the cluster; --show prints the script alone\n"
    )
    image = f"r@sha256:{'0' * 64}"
    words = ["launch", "--on", "kubernetes", "--claim", "runs", "--image", image, "--devices-per-node", "1"]
    assert main([*words, "--", "train", "tiny"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no way to a cluster here: kubectl is not found\n"
        "  try: kubectl; --show prints the manifest alone\n"
    )


# What nodes tell.


def test_nodes_that_differ_are_named() -> None:
    nodes = [
        {"node": f"node{number}", "is_shared": True, "versions": {"torch": version, "python": "3.11.7"}}
        for number, version in enumerate(("2.13.0", "2.12.1", "2.13.0"))
    ]
    with pytest.raises(ShardwiseError) as error:
        at_node.judge(nodes, Path("run"))
    assert str(error.value) == (
        "nodes have different versions of torch: 2.13.0 on node0, node2; 2.12.1 on node1\n"
        "  try: --python with an environment that all nodes share"
    )
    alike: list[dict[str, Any]] = [{**each, "versions": {}, "clock": 1000.0} for each in nodes]
    at_node.judge(alike, Path("run"))
    alike[1]["clock"] = 1000.0 - 3600
    with pytest.raises(ShardwiseError, match=r"the clock of node0 is 60 min ahead of that of node1"):
        at_node.judge(alike, Path("run"))
    nodes[2]["is_shared"] = False
    with pytest.raises(ShardwiseError, match="the folder run is not shared: node2 does not see what was written there"):
        at_node.judge(nodes, Path("run"))


def test_a_node_reports_whether_it_sees_the_folder_and_a_port_that_is_taken(tmp_path: Path) -> None:
    mark, port = at_node.write_mark(tmp_path), free_port()
    with socket.create_server(("", port)):
        told = at_node.report(tmp_path, mark, port)
        assert told["is_shared"]
        assert not told["is_port_free"]
        with pytest.raises(ShardwiseError, match=f"port {port} of .* is taken"):
            at_node.choose_port(port)
    assert at_node.report(tmp_path, mark, port)["is_port_free"]
    assert not at_node.report(tmp_path / "elsewhere", mark, None)["is_shared"]


@pytest.mark.parametrize(
    ("events", "status", "then"),
    [
        ([("start", {}), ("end", {"why": "SIGUSR1"})], 0, "requeue"),
        ([("start", {}), ("end", {"why": "finished"})], 0, "over"),
        ([("start", {})], 1, "again"),
        ([("start", {}), ("end", {"why": "rank 1 was killed"})], 1, "again"),
        ([("start", {}), ("end", {"why": "the loss is nan", "is_final": True})], 1, "over"),
        ([("start", {}), ("end", {"why": "rank 1 is slow", "leave_out": ["b"]})], 75, "over"),
        ([], 1, "over"),
    ],
)
def test_what_is_done_when_ranks_have_ended(
    tmp_path: Path, events: list[tuple[str, dict[str, Any]]], status: int, then: str
) -> None:
    note(tmp_path, "start")
    at_node.begin(tmp_path, None, ["a"], "1", 0)
    for kind, facts in events:
        note(tmp_path, kind, **facts)
    assert at_node.end(tmp_path, status) == then


def test_what_only_the_machines_have_is_left_to_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        "train tiny --plan tp=7 --set data.source=/scratch/some.tokens",
        "train tiny --plan tp=7 --set model.source=their_package.module:factory",
        "serve /scratch/model --plan tp=7",
    ):
        assert main(["launch", "--on", "slurm", "--devices-per-node", "7", "--show", "--", *words.split()]) == 0
    assert capsys.readouterr().out.count("tp=7") >= 3
    assert not list(here.iterdir())


def test_words_of_a_server_listen_for_others_unless_it_runs_here() -> None:
    work = read_work(["serve", "model", "--port", "9000"])
    assert work.words == ("model", "--port", "9000", "--host", "0.0.0.0")
    work = read_work(["serve", "model", "--port", "9000"], is_local=True)
    assert work.words == ("model", "--port", "9000", "--host", "127.0.0.1")


def test_every_option_of_one_site_is_refused_on_the_others() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for place in ("hosts", "slurm", "kubernetes"):
        (group,) = (each for each in parser._action_groups if each.title == f"on {place}")
        for action in group._group_actions:
            assert ONLY_ON[action.dest] == ((place,), action.default), action.dest


@pytest.mark.parametrize("words", [["train", "tiny", "--plan", "dp=1"], ["serve", "model", "--plan", "dp=1"]])
def test_variables_reach_the_ranks_of_this_machine(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert here.is_dir()
    assert "env A=1 " in text_of(["launch", "--on", "local", "--env", "A=1", "--", *words], capsys).replace(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 ", ""
    )


# Runs.


@pytest.mark.whole
def test_a_run_of_this_machine_is_started_and_followed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LOCAL, "--follow", "--", "train", "tiny", "--plan", "dp=1", "--set", "steps=3", "--folder", "run"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "step 3/3" in said
    assert whys() == ["finished"]
    assert (here / "run/launch/local.sh").is_file()
    assert main(["status", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["checkpoint"]) == ("finished", 3, "step-00000003")
    assert told["starts"][0]["places"][0]["rank"] == 0


@pytest.mark.whole
def test_a_rank_that_is_killed_is_started_again_and_status_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LOCAL, "--", "train", "tiny", "--plan", "dp=2", "--set", "steps=300", "--set", "checkpoint.every=5"]
    assert main([*words, "--set", "evaluation.every=0", "--folder", "run"]) == 0
    deadline = time.monotonic() + 200
    while not any(row["step"] >= 10 for row in read_metrics(here / "run")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (start,) = [each for each in read_journal(here / "run") if each["event"] == "start"]
    os.kill(start["places"][1]["process"], signal.SIGKILL)
    while "finished" not in whys():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    capsys.readouterr()
    assert main(["status", "run"]) == 0
    said = capsys.readouterr().out
    assert "restarted once" in said
    assert "rank 1" in said
    losses = [row for row in read_metrics(here / "run") if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, 301))


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """How to reach this machine over a real ssh, with keys made for it."""
    daemon = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
    if daemon is None or shutil.which("ssh") is None:
        pytest.skip("no ssh server is installed here: apt install openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "known").write_text((folder / "user.pub").read_text())
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/known\n"
        f"StrictModes no\nPidFile none\nUsePAM no\nPermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([daemon, "-D", "-e", "-f", folder / "config"], stdout=said, stderr=said)
    options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes -o LogLevel=ERROR"
    words = f"ssh -p {port} -i {folder}/user {options}"
    deadline = time.monotonic() + 30
    while subprocess.run([*words.split(), "127.0.0.1", "true"], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.1)
    yield words
    process.terminate()
    process.wait()


def hosts_words(ssh: str, *more: str) -> list[str]:
    return ["launch", "--on", "hosts", "--ssh", ssh, "--device", "cpu", "--env", "PYTHONPATH", *more]


def test_hosts_are_asked_before_anything_is_started(here: Path, ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--", "train", "tiny", "--plan", "dp=2", "--folder", "run"]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words = hosts_words(ssh, "--hosts", "127.0.0.1,localhost", "--port", str(port))
        assert main([*words, *train]) == 1
    assert capsys.readouterr().err == f"error: port {port} of 127.0.0.1 is taken\n  try: --port {port + 1}\n"
    assert main([*hosts_words(ssh, "--hosts", "127.0.0.1,localhost", "--python", "/no/python"), *train]) == 1
    assert "error: 127.0.0.1 cannot run /no/python in " in capsys.readouterr().err
    assert main([*hosts_words(ssh.replace("ssh -p", "ssh -p 1 -p"), "--hosts", "127.0.0.1,localhost"), *train]) == 1
    assert "error: 127.0.0.1 cannot be reached: " in capsys.readouterr().err
    assert not (here / "run/launch").exists()


@pytest.mark.whole
def test_two_hosts_train_together_over_ssh(here: Path, ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = hosts_words(ssh, "--hosts", "127.0.0.1,localhost", "--port", str(free_port()), "--follow")
    assert main([*words, "--", "train", "tiny", "--plan", "dp=2", "--set", "steps=4", "--folder", "run"]) == 0
    assert "plan dp=2 on 2 x cpu" in capsys.readouterr().out
    (start,) = [each for each in read_journal(here / "run") if each["event"] == "start"]
    assert [place["host"] for place in start["places"]] == ["127.0.0.1", "localhost"], (
        "ranks are where hosts were named"
    )
    assert whys() == ["finished"]
