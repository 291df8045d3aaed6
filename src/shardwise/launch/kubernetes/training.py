"""A training as a JobSet, or as Kubeflow's TrainJob."""

from shardwise.launch.kubernetes.pod import (
    OfCluster,
    Tree,
    affinity,
    container,
    metadata,
    pod_security,
    pod_spec,
    tolerations,
    topology_annotations,
    volumes_of,
    words_in_pod,
)
from shardwise.launch.layout import Layout
from shardwise.launch.work import Work

_PORT = 29500
#: Kubeflow's runtime, and its job that has the pods.
_RUNTIME, _JOB = "torch-distributed", "node"
#: How long an ended job is kept for inspection: a week.
_KEPT_SECONDS = 7 * 24 * 3600


def jobset(work: Work, layout: Layout, cluster: OfCluster) -> list[Tree]:
    """Return one Job whose pods are the nodes, by index. If one fails, all are recreated, and resume from a checkpoint.

    Pods that are evicted, preempted or lost with their node have not failed by themselves: that is not counted."""
    name = work.safe_name
    command = [
        "python", "-m", "torch.distributed.run", "--nnodes", str(layout.num_nodes),
        "--nproc-per-node", str(layout.devices_per_node), "--node-rank", "$(JOB_COMPLETION_INDEX)",
        # The first pod, by the host name that the JobSet gives it.
        "--master-addr", f"{name}-ranks-0-0.{name}", "--master-port", str(_PORT),
        "-m", "shardwise", work.kind, *words_in_pod(work),
    ]  # fmt: skip
    index = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}},
    }
    attempt = {"name": "SHARDWISE_ATTEMPT", "value": f"kubernetes jobset {cluster.namespace}/{name}"}
    inside = container(work, layout, cluster, command, [index, attempt])
    inside["ports"] = [{"containerPort": _PORT, "name": "ranks"}]
    near = affinity(work, layout, cluster, {"jobset.sigs.k8s.io/jobset-name": name})
    template: Tree = {"spec": {**pod_spec(work, layout, cluster, inside, near), "restartPolicy": "Never"}}
    annotations = topology_annotations(work, layout, cluster)
    if annotations:
        template = {"metadata": {"annotations": annotations}, **template}
    job = {
        "parallelism": layout.num_nodes,
        "completions": layout.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": template,
    }
    document: Tree = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(work, cluster),
        "spec": {
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "failurePolicy": {
                "maxRestarts": cluster.num_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "disrupted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
        },
    }
    return [*recipe_map(work, cluster), document]


def trainjob(work: Work, layout: Layout, cluster: OfCluster) -> list[Tree]:
    """Return the same for Kubeflow, whose runtime `torch-distributed` numbers the nodes and sets up the rendezvous."""
    command = ["python", "-m", "torch.distributed.run", "-m", "shardwise", work.kind, *words_in_pod(work)]
    inside = container(work, layout, cluster, command)
    near = affinity(work, layout, cluster, {"jobset.sigs.k8s.io/jobset-name": work.safe_name})
    patch: Tree = {
        "securityContext": pod_security(),
        "volumes": [each for each, _ in volumes_of(work, cluster)],
        "containers": [{key: inside[key] for key in ("name", "volumeMounts", "securityContext")}],
    }
    if layout.has_gpus:
        patch["tolerations"] = tolerations()
    if near is not None:
        patch["affinity"] = near
    pod: Tree = {"spec": patch}
    annotations = topology_annotations(work, layout, cluster)
    if annotations:
        pod = {"metadata": {"annotations": annotations}, **pod}
    template = {"spec": {"replicatedJobs": [{"name": _JOB, "template": {"spec": {"template": pod}}}]}}
    document: Tree = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(work, cluster),
        "spec": {
            "runtimeRef": {"name": _RUNTIME},
            "trainer": {
                "image": cluster.image,
                "command": command,
                "env": inside["env"],
                "numNodes": layout.num_nodes,
                "numProcPerNode": layout.devices_per_node,
                "resourcesPerNode": inside["resources"],
            },
            "runtimePatches": [{"manager": "shardwise.launch/run", "trainingRuntimeSpec": {"template": template}}],
        },
    }
    return [*recipe_map(work, cluster), document]


def recipe_map(work: Work, cluster: OfCluster) -> list[Tree]:
    """Return a ConfigMap with the recipe's file for the pods, if there is one."""
    if work.recipe is None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{work.safe_name}-recipe", "namespace": cluster.namespace},
            "data": {work.recipe.name: work.recipe.read_text(encoding="utf-8")},
        }
    ]
