"""The pod of one node: its container, its resources, its volumes, and its affinity.

A pod has the devices of one node. Ranks are numbered node by node, so the ranks of a tensor group are on one host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.launch.layout import Layout
from shardwise.launch.torchrun import SHUTDOWN
from shardwise.launch.work import Work

RUNS, RECIPES = "/runs", "/etc/shardwise"
_USER = 1000
#: What a pod may write to its node's disk: compiler caches, and logs. Above it this pod is evicted, no neighbour.
_SCRATCH = "16Gi"
#: Seconds of the grace period that remain after ranks have been waited for.
_LAST_SECONDS = 10

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCluster:
    """The cluster's parameters beside nodes and devices.

    `image` is by its digest. `claim` is a PersistentVolumeClaim that all nodes share. `rack` is the label for a node's
    rack; `queue` is one of Kueue's. `secret` has a server's API key under `key`. Ranks that are told to end have
    `save_seconds` to save.
    """

    image: str
    namespace: str = "default"
    claim: str | None = None
    rack: str | None = None
    queue: str | None = None
    secret: str | None = None
    cpus: int | None = None
    memory: str | None = None
    replicas: int = 1
    num_restarts: int = 3
    save_seconds: int = 120
    variables: tuple[tuple[str, str], ...] = ()


def words_in_pod(work: Work) -> list[str]:
    """Return the command's words, with its files at their paths in the pod."""
    words = list(work.words)
    if work.kind == "train":
        words[words.index("--folder") + 1] = folder_in_pod(work)
        if not any(word.partition("=")[0] == "--copies-every" for word in words):
            # Memory is lost with the pod, and all pods of a run are recreated together: copies there would be useless.
            words += ["--copies-every", "0"]
    if work.recipe is not None:
        words = [f"{RECIPES}/{work.recipe.name}" if Path(word) == work.recipe else word for word in words]
    # Escape what Kubernetes would expand as a variable.
    return [word.replace("$(", "$$(") for word in words]


def folder_in_pod(work: Work) -> str:
    """Return the run's folder, on the claim."""
    folder = PurePosixPath(work.folder.as_posix())
    return str(folder) if folder.is_relative_to(RUNS) else f"{RUNS}/{folder.name}"


def metadata(work: Work, cluster: OfCluster, **more: object) -> Tree:
    """Return a name, and the recommended labels."""
    labels = {
        "app.kubernetes.io/name": "shardwise",
        "app.kubernetes.io/component": work.kind,
        "app.kubernetes.io/instance": work.safe_name,
    }
    if cluster.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = cluster.queue
    return {"name": work.safe_name, "namespace": cluster.namespace, "labels": labels, **more}


def container(work: Work, layout: Layout, cluster: OfCluster, command: Sequence[str], env: Sequence[Tree] = ()) -> Tree:
    """Return the container of the pod, without any privilege."""
    given: Tree = {}
    if layout.has_gpus:
        given["nvidia.com/gpu"] = layout.devices_per_node
    given["cpu"] = cluster.cpus or layout.devices_per_node * (8 if layout.has_gpus else 1)
    given["memory"] = cluster.memory or f"{layout.devices_per_node * (64 if layout.has_gpus else 2)}Gi"
    given["ephemeral-storage"] = _SCRATCH
    return {
        "name": "node",
        "image": cluster.image,
        "command": list(command),
        "env": [*_variables(work, cluster), *env],
        "resources": {"requests": given, "limits": dict(given)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": each["name"], "mountPath": path} for each, path in volumes_of(work, cluster)],
    }


def pod_spec(work: Work, layout: Layout, cluster: OfCluster, inside: Tree, near: Tree | None) -> Tree:
    """Return a pod around one container. It is not root, and has no access to the cluster's API."""
    spec: Tree = {
        "automountServiceAccountToken": False,
        # No environment variables for every service of the namespace.
        "enableServiceLinks": False,
        # On SIGTERM, ranks save first.
        "terminationGracePeriodSeconds": cluster.save_seconds,
        "securityContext": pod_security(),
        "containers": [inside],
        "volumes": [each for each, _ in volumes_of(work, cluster)],
    }
    if layout.has_gpus:
        spec["tolerations"] = tolerations()
    if near is not None:
        spec["affinity"] = near
    return spec


def tolerations() -> list[Tree]:
    """Tolerate the taint of GPU nodes, which are often reserved for pods that request GPUs."""
    return [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def pod_security() -> Tree:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        # Otherwise the owner of every file of the claim is changed, one by one, before a pod starts.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def volumes_of(work: Work, cluster: OfCluster) -> list[tuple[Tree, str]]:
    """Return volumes and their mount paths: shared memory, scratch space, runs and recipe."""
    found: list[tuple[Tree, str]] = [
        ({"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, "/dev/shm"),
        ({"name": "scratch", "emptyDir": {"sizeLimit": _SCRATCH}}, "/tmp"),
    ]
    if cluster.claim is not None:
        found.append(({"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}}, RUNS))
    if work.recipe is not None:
        found.append(({"name": "recipe", "configMap": {"name": f"{work.safe_name}-recipe"}}, RECIPES))
    return found


def affinity(work: Work, layout: Layout, cluster: OfCluster, pods: Mapping[str, str]) -> Tree | None:
    """Return the affinity to the other pods of this run: one rack, preferred for pipeline neighbours, required for
    tensor groups that span several hosts."""
    if cluster.rack is None or layout.num_nodes == 1:
        return None
    term = {"labelSelector": {"matchLabels": dict(pods)}, "topologyKey": cluster.rack}
    if must_share_rack(work, layout):
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }


def must_share_rack(work: Work, layout: Layout) -> bool:
    """Whether a tensor group spans several hosts, which must then at least share a rack."""
    return work.plan is not None and work.plan.tp > 1 and bool(layout.devices_per_node % work.plan.tp)


def topology_annotations(work: Work, layout: Layout, cluster: OfCluster) -> dict[str, str]:
    """Return the same for Kueue, which places all pods of a run at once."""
    if cluster.queue is None or cluster.rack is None or layout.num_nodes == 1:
        return {}
    word = "required" if must_share_rack(work, layout) else "preferred"
    return {f"kueue.x-k8s.io/podset-{word}-topology": cluster.rack}


def _variables(work: Work, cluster: OfCluster) -> list[Tree]:
    patience = str(max(cluster.save_seconds - _LAST_SECONDS, 1))
    return [
        # The root file system is read-only, so compiler caches go to the scratch volume.
        {"name": "HOME", "value": "/tmp"},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *([{"name": SHUTDOWN, "value": patience}] if work.kind == "train" else []),
        *({"name": name, "value": value} for name, value in cluster.variables),
    ]
