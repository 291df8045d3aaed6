"""Start on Kubernetes: manifests, checked against what the cluster has, and submitted with `kubectl`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ShardwiseError, unknown
from shardwise.launch.kubernetes.pod import OfCluster
from shardwise.launch.kubernetes.serving import leaderworkerset
from shardwise.launch.kubernetes.training import jobset, trainjob
from shardwise.launch.kubernetes.yaml_text import to_yaml
from shardwise.launch.layout import Layout
from shardwise.launch.target import Submitted
from shardwise.launch.tools import ask, need, try_asking
from shardwise.launch.work import Work
from shardwise.output import save_output

As = Literal["jobset", "trainjob"]
#: The API's name of each kind, and which project it comes from.
_KINDS = {
    "jobset": ("jobsets.jobset.x-k8s.io", "JobSet (https://jobset.sigs.k8s.io)"),
    "trainjob": ("trainjobs.trainer.kubeflow.org", "Kubeflow Trainer (https://www.kubeflow.org)"),
    "serve": ("leaderworkersets.leaderworkerset.x-k8s.io", "LeaderWorkerSet (https://lws.sigs.k8s.io)"),
}
_DIGEST = re.compile(r"[\w.:/-]+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnKubernetes:
    """One training, or one server with its replicas."""

    work: Work
    layout: Layout
    cluster: OfCluster
    made_as: As = "jobset"
    on: str = "kubernetes"

    @property
    def path(self) -> Path:
        return self.work.launch_folder / "kubernetes.yaml"

    @property
    def _kind(self) -> str:
        return "serve" if self.work.kind == "serve" else self.made_as

    def text(self) -> str:
        make = {"jobset": jobset, "trainjob": trainjob, "serve": leaderworkerset}[self._kind]
        return to_yaml(make(self.work, self.layout, self.cluster))

    def check(self) -> None:
        """Check that the cluster answers, knows this kind of object, and has what the manifest names."""
        need("kubectl", problem="there is no way to a cluster here", remedy="kubectl; --show prints the manifest alone")
        kind, where = _KINDS[self._kind]
        namespaces = self._names(["get", "namespaces"], "kubectl config get-contexts, and a context that answers")
        if self.cluster.namespace not in namespaces:
            error = unknown("namespace", self.cluster.namespace, namespaces)
            raise ShardwiseError(error.problem, remedy=f"--namespace {error.remedy or namespaces[0]}")
        if try_asking(["kubectl", "get", "crd", kind]).returncode != 0:
            raise ShardwiseError(f"the cluster does not know {kind}", remedy=f"{where}, installed by who keeps it")
        for option, name, what in (
            ("--queue", self.cluster.queue, "localqueues.kueue.x-k8s.io"),
            ("--claim", self.cluster.claim, "persistentvolumeclaims"),
            ("--secret", self.cluster.secret, "secrets"),
        ):
            if name is not None:
                self._check_there(option, name, what)

    def submit(self) -> Submitted:
        save_output(self.path, self.text())
        remedy = f"what it names, in {self.path}"
        ask(["kubectl", "apply", "--dry-run=server", "-f", str(self.path)], remedy=remedy)
        ask(["kubectl", "apply", "-f", str(self.path)], remedy=remedy)
        kind, _ = _KINDS[self._kind]
        name = f"{self.cluster.namespace}/{self.work.safe_name}"
        return Submitted(
            job=name,
            log=None,
            state=lambda: object_state(kind, name),
            is_over=lambda state: state in ("Completed", "Complete", "Failed", "Gone"),
            is_good=lambda state: state in ("Completed", "Complete"),
            stop=f"kubectl delete -f {self.path}",
        )

    def _check_there(self, option: str, name: str, what: str) -> None:
        """Refuse a name that does not exist in the namespace."""
        short = what.partition(".")[0]
        names = self._names(
            ["get", what, "--namespace", self.cluster.namespace], f"leave {option} out, or what the cluster has"
        )
        if name in names:
            return
        if not names:
            raise ShardwiseError(
                f"namespace {self.cluster.namespace} has no {short}, so no {name!r}", remedy=f"kubectl get {short} -A"
            )
        error = unknown(short.rstrip("s"), name, names)
        raise ShardwiseError(error.problem, remedy=f"{option} {error.remedy or names[0]}")

    def _names(self, words: Sequence[str], remedy: str) -> list[str]:
        told = ask(["kubectl", *words, "--output", "jsonpath={.items[*].metadata.name}"], remedy=remedy)
        return told.split()


def check_cluster(work: Work, layout: Layout, cluster: OfCluster) -> None:
    """Refuse a manifest that could not work on any cluster."""
    if not _DIGEST.fullmatch(cluster.image):
        raise ShardwiseError(
            f"--image {cluster.image} is not named by a digest, so nodes could run different ones",
            remedy="--image REPOSITORY@sha256:..., as docker push prints it",
        )
    if work.kind == "train" and cluster.claim is None:
        raise ShardwiseError(
            "pods share no folder, so a run that is started again would find no checkpoint",
            remedy="--claim with a PersistentVolumeClaim that all nodes can mount (ReadWriteMany)",
        )
    if work.kind == "serve" and cluster.secret is None:
        raise ShardwiseError(
            "a server that others can reach needs an API key",
            remedy="--secret NAME, made by: kubectl create secret generic NAME --from-literal=key=...",
        )
    if cluster.replicas < 1:
        raise ShardwiseError(f"--replicas {cluster.replicas}: it must be at least 1", remedy="--replicas 1")
    if layout.num_nodes > 1 and work.kind == "serve":
        raise ShardwiseError(
            f"serve runs in one pod, and {layout} are requested", remedy="--replicas, for more requests"
        )


def object_state(kind: str, name: str) -> str:
    """Return its last true condition; the ready replicas of a server; or that it is gone."""
    namespace, _, short = name.partition("/")
    told = try_asking(["kubectl", "get", kind, short, "--namespace", namespace, "--output", "json"])
    if told.returncode != 0:
        return "Gone"
    status: dict[str, Any] = json.loads(told.stdout).get("status", {})
    if "readyReplicas" in status:
        return f"{status['readyReplicas']} of {status.get('replicas', '?')} ready"
    holding: list[str] = [each["type"] for each in status.get("conditions", []) if each.get("status") == "True"]
    over = [each for each in holding if each in ("Completed", "Complete", "Failed")]
    return (over or holding or ["Running" if status else "Pending"])[-1]
