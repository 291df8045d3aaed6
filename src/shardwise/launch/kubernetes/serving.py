"""A server as a LeaderWorkerSet, and the Service in front of its replicas."""

from shardwise.launch.kubernetes.pod import OfCluster, Tree, container, metadata, pod_spec, words_in_pod
from shardwise.launch.layout import Layout
from shardwise.launch.work import Work

#: How long loading weights may take before the first answer: this many probes, this many seconds apart.
_STARTS, _START_SECONDS = 180, 10
#: How long a busy server may take to answer a probe, and how long requests may still reach one that is about to end.
_ANSWER_SECONDS, _LATE_SECONDS = 5, 5


def leaderworkerset(work: Work, layout: Layout, cluster: OfCluster) -> list[Tree]:
    """Return replicas of one pod each, with all ranks of its plan. Those that answer /health get requests."""
    assert work.port is not None, "a server has a port"
    inside = container(
        work, layout, cluster, ["python", "-m", "shardwise", "serve", *words_in_pod(work)], _key(cluster)
    )
    health = {"httpGet": {"path": "/health", "port": "http"}}
    inside |= {
        "ports": [{"containerPort": work.port, "name": "http"}],
        "startupProbe": {
            **health, "periodSeconds": _START_SECONDS, "timeoutSeconds": _ANSWER_SECONDS, "failureThreshold": _STARTS,
        },
        "readinessProbe": {**health, "periodSeconds": 5, "timeoutSeconds": _ANSWER_SECONDS, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        # Delay SIGTERM until others have learnt that it gets no more requests.
        "lifecycle": {"preStop": {"sleep": {"seconds": _LATE_SECONDS}}},
    }  # fmt: skip
    labels = {"app.kubernetes.io/instance": work.safe_name, "app.kubernetes.io/name": "shardwise"}
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(work.port),
        "prometheus.io/path": "/metrics",
    }
    spec = pod_spec(work, layout, cluster, inside, None)
    if cluster.replicas > 1:
        # Spread replicas over hosts: a lost host then takes only one of them.
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ]
    workers: Tree = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(work, cluster),
        "spec": {
            "replicas": cluster.replicas,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec},
            },
        },
    }
    # The LeaderWorkerSet creates a headless service of its own name.
    about = metadata(work, cluster)
    about["name"] = f"{work.safe_name}-http"
    service: Tree = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {
            "selector": {
                "leaderworkerset.sigs.k8s.io/name": work.safe_name,
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            },
            "ports": [{"name": "http", "port": work.port, "targetPort": "http"}],
        },
    }
    return [workers, service, *_budget(work, cluster, labels)]


def _budget(work: Work, cluster: OfCluster, pods: dict[str, str]) -> list[Tree]:
    """Return a budget: when nodes are drained, only one of several replicas is taken down at a time."""
    if cluster.replicas == 1:
        return []
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": pods}}
    return [
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(work, cluster), "spec": spec}
    ]


def _key(cluster: OfCluster) -> list[Tree]:
    """Return the API key's variable: others can reach the server, so it needs one."""
    source = {"secretKeyRef": {"name": cluster.secret, "key": "key"}}
    return [{"name": "SHARDWISE_API_KEY", "valueFrom": source}]
