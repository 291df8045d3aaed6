"""Manifests: golden files, held to the published schemas of Kubernetes and to the definitions of the other kinds.

And a `kubectl` that answers as one of a cluster would, so that what is refused, handed over and followed can be seen.
"""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.launch.kubernetes.yaml_text import to_yaml
from tests.launch.crd_facts import FACTS, Schema, problems

yaml: Any = pytest.importorskip("yaml", reason="pip install kubernetes-validate, which brings a reader of YAML")
FOLDER = Path(__file__).parent / "manifests"
IMAGE = f"registry.example/shardwise@sha256:{'0123456789abcdef' * 4}"
#: The releases of Kubernetes that are supported at a time are three; one more for who is late.
RELEASES = ("1.34", "1.35", "1.36", "1.37")
RECIPE = 'name = "mine"\nsteps = 10\nbatch = 16\n[model]\nheads = 8\n'
TRAIN = ["--claim", "runs", "--rack", "topology.example/rack", "--image", IMAGE]
CASES = {
    "jobset": [
        *TRAIN,
        "--devices-per-node",
        "8",
        "--",
        "train",
        "mine.toml",
        "--plan",
        "dp=2,tp=8,pp=2,microbatches=4",
    ],
    "jobset-wide": [
        *TRAIN,
        "--devices-per-node",
        "4",
        "--queue",
        "gpus",
        "--",
        "train",
        "tiny",
        "--set",
        "model.heads=8",
        "--plan",
        "tp=8",
    ],
    "trainjob": [*TRAIN, "--as", "trainjob", "--devices-per-node", "8", "--", "train", "mine.toml", "--plan", "dp=16"],
    "serve": ["--secret", "key", "--claim", "runs", "--image", IMAGE, "--replicas", "2", "--", "serve", "/runs/model"],
}


@pytest.fixture(autouse=True)
def _with_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE)


def words_of(case: str) -> list[str]:
    words = ["launch", "--on", "kubernetes", *CASES[case]]
    return [*words, "--plan", "tp=4"] if case == "serve" else [*words, "--folder", "runs/first"]


def text_of(case: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = words_of(case)
    assert main([words[0], "--show", "--json", *words[1:]]) == 0
    text: str = json.loads(capsys.readouterr().out)["text"]
    return text


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_is_what_was_reviewed(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text_of(case, capsys) == (FOLDER / f"{case}.yaml").read_text(), "shardwise launch --show prints the new one"


def whole_object(schema: Schema, value: Any) -> dict[str, Any] | None:
    """An object of Kubernetes' own around a part of one, as its schemas are of whole objects."""
    container: dict[str, Any] = {"name": "node", "image": "i"}
    pod: dict[str, Any] = {"containers": [container]}
    if schema.name == "job spec":
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": value}
    if schema.name == "pod template":
        metadata = {"name": "a", **value.get("metadata", {})}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": value["spec"]}
    places = {"env": "env", "resources": "resources", "mounts": "volumeMounts", "security": "securityContext"}
    of_pod = {"volumes": "volumes", "pod security": "securityContext", "affinity": "affinity"}
    of_pod["tolerations"] = "tolerations"
    if schema.name in places:
        container[places[schema.name]] = value
    elif schema.name in of_pod:
        pod[of_pod[schema.name]] = value
    metadata = value if schema.name == "metadata" else {"name": "a"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_is_valid_in_every_release(case: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    wholes = []
    for document in yaml.safe_load_all((FOLDER / f"{case}.yaml").read_text()):
        kind = f"{document['apiVersion']} {document['kind']}"
        if kind not in FACTS:
            wholes.append(document)
            continue
        parts: list[tuple[Schema, Any]] = []
        assert problems(document, FACTS[kind], kind, parts) == []
        wholes += [whole_object(*part) for part in parts]
    assert len(wholes) >= 2
    for release in RELEASES:
        for each in wholes:
            validate(each, release, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    (document,) = yaml.safe_load_all((FOLDER / "jobset-wide.yaml").read_text())
    fact = FACTS["jobset.x-k8s.io/v1alpha2 JobSet"]
    wrong = deepcopy(document)
    wrong["spec"]["failurePolicy"]["restarts"] = 3
    wrong["spec"]["failurePolicy"]["restartStrategy"] = "Again"
    assert len(problems(wrong, fact, "", [])) == 2
    parts: list[tuple[Schema, Any]] = []
    wrong = deepcopy(document)
    job = wrong["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["template"]["spec"]["containers"][0]["securityContext"]["privilege"] = False
    assert problems(wrong, fact, "", parts) == []
    whole = next(whole_object(*part) for part in parts if part[0].name == "job spec")
    with pytest.raises(validate.ValidationError):
        validate.validate(whole, RELEASES[-1], strict=True)


@pytest.mark.parametrize("case", CASES)
def test_no_pod_has_a_privilege_and_all_have_limits(case: str) -> None:
    text = (FOLDER / f"{case}.yaml").read_text()
    for line in (
        "runAsNonRoot: true",
        "allowPrivilegeEscalation: false",
        "readOnlyRootFilesystem: true",
        "type: RuntimeDefault",
        "limits:",
        f'image: "{IMAGE}"',
    ):
        assert line in text, line
    for word in ("privileged", "hostPath", "hostNetwork", "hostPID", "secret-value"):
        assert word not in text


def test_tensor_groups_that_need_several_hosts_must_share_a_rack_and_pipelines_should() -> None:
    wide, narrow = ((FOLDER / f"{name}.yaml").read_text() for name in ("jobset-wide", "jobset"))
    assert "requiredDuringSchedulingIgnoredDuringExecution" in wide
    assert "kueue.x-k8s.io/podset-required-topology: topology.example/rack" in wide
    assert "preferredDuringSchedulingIgnoredDuringExecution" in narrow


def test_yaml_reads_back_as_it_was() -> None:
    values = ["yes", "No", "1e3", "0x1", "- a", "a: b", "#", "", " a ", "~", "null", "é", "'", '"', "a\nb\n", "-m", "1"]
    document = {
        "texts": values,
        "block": "a = 1\n\n[b]\n  c = 2\n",
        "odd": " a\nb \n\n",
        "empty": {},
        "none": [],
        "n": 1,
        "t": True,
        "on": None,
    }
    (read,) = yaml.safe_load_all(to_yaml([document]))
    assert read == document


KUBECTL = """#!/bin/bash
echo "$@" >> "$KUBECTL_FOLDER/calls"
case "$*" in
"get namespaces"*) echo -n "default team" ;;
"get crd jobsets"*) ;;
"get crd"*) exit 1 ;;
"get persistentvolumeclaims"*) echo -n "runs data" ;;
"get localqueues"*) ;;
"apply --dry-run=server"*)
    if [ -e "$KUBECTL_FOLDER/refuses" ]; then echo 'error: quota "gpus" is used up' >&2; exit 1; fi ;;
"apply"*) echo created ;;
"get jobsets.jobset.x-k8s.io first"*)
    echo '{"status": {"restarts": 0, "conditions": [{"type": "Completed", "status": "True"}]}}' ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers as `kubectl` does: no cluster can be had in a test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(folder))
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--namespace", "teem", "--claim", "runs"],
            "error: unknown namespace 'teem'; known: default, team\n  try: --namespace team\n",
        ),
        (
            ["--claim", "run"],
            "error: unknown persistentvolumeclaim 'run'; known: runs, data\n  try: --claim runs\n",
        ),
        (
            ["--claim", "runs", "--queue", "gpus"],
            "error: namespace default has no localqueues, so no 'gpus'\n  try: kubectl get localqueues -A\n",
        ),
        (
            ["--claim", "runs", "--as", "trainjob"],
            "error: the cluster does not know trainjobs.trainer.kubeflow.org\n"
            "  try: Kubeflow Trainer (https://www.kubeflow.org), installed by who keeps it\n",
        ),
    ],
)
def test_what_a_cluster_does_not_have_is_refused_before_anything_is_submitted(
    kubectl: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    rest = ["--", "train", "tiny", "--plan", "dp=1", "--folder", "runs/first"]
    assert main(["launch", "--on", "kubernetes", "--image", IMAGE, *words, *rest]) == 1
    assert capsys.readouterr().err == said
    assert "apply" not in (kubectl / "calls").read_text()


def test_a_manifest_is_tried_then_handed_over_and_followed(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--on", "kubernetes", "--image", IMAGE, "--claim", "runs", "--follow", "--json"]
    (kubectl / "refuses").touch()
    assert main([*words, "--", "train", "tiny", "--plan", "dp=1", "--folder", "runs/first"]) == 1
    assert "kubectl refuses: error: quota" in capsys.readouterr().out
    (kubectl / "refuses").unlink()
    assert main([*words, "--", "train", "tiny", "--plan", "dp=1", "--folder", "runs/first"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["job"]) == ("Completed", "default/first")
    assert main(["status", "runs/first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job_state"] == "Completed"
