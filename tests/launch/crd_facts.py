"""What the definitions of JobSet, LeaderWorkerSet and TrainJob say of the fields that we write.

Read from `jobset_types.go` (v1alpha2, 0336a8f), `leaderworkerset_types.go` (v1, 024af08) and `trainjob_types.go`
(v1alpha1, 0015772). For each object its fields: a type, a tuple of allowed words, a table of fields below it, or a list
of one of these. What is Kubernetes' own (a pod, a job) is a `Schema`, and held to those that are published. A field
that is not here does not exist.
"""

from typing import Any


class Schema:
    """Something of Kubernetes' own, by what it is."""

    def __init__(self, name: str) -> None:
        self.name = name


POD_TEMPLATE, JOB_SPEC = Schema("pod template"), Schema("job spec")
ENV, RESOURCES, VOLUMES, MOUNTS, POD_SECURITY, SECURITY, AFFINITY, TOLERATIONS, METADATA = map(
    Schema, ("env", "resources", "volumes", "mounts", "pod security", "security", "affinity", "tolerations", "metadata")
)

FACTS: dict[str, dict[str, Any]] = {
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        "apiVersion": str,
        "kind": str,
        "metadata": METADATA,
        "spec": {
            "replicatedJobs": [
                {"name": str, "groupName": str, "replicas": int, "template": {"metadata": METADATA, "spec": JOB_SPEC}}
            ],
            "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
            "successPolicy": {"operator": ("All", "Any"), "targetReplicatedJobs": [str]},
            "failurePolicy": {
                "maxRestarts": int,
                "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
                "rules": [
                    {
                        "name": str,
                        "action": (
                            "FailJobSet",
                            "RestartJobSet",
                            "RestartJobSetAndIgnoreMaxRestarts",
                            "RestartJob",
                            "RestartJobAndIgnoreMaxRestarts",
                        ),
                        "onJobFailureReasons": [str],
                        "onJobFailureMessagePatterns": [str],
                        "targetReplicatedJobs": [str],
                    }
                ],
            },
            "suspend": bool,
            "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
            "ttlSecondsAfterFinished": int,
        },
    },
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "apiVersion": str,
        "kind": str,
        "metadata": METADATA,
        "spec": {
            "replicas": int,
            "startupPolicy": ("LeaderCreated", "LeaderReady"),
            "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
            "leaderWorkerTemplate": {
                "leaderTemplate": POD_TEMPLATE,
                "workerTemplate": POD_TEMPLATE,
                "size": int,
                "restartPolicy": ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            },
        },
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "apiVersion": str,
        "kind": str,
        "metadata": METADATA,
        "spec": {
            "runtimeRef": {"name": str, "apiGroup": str, "kind": str},
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "env": ENV,
                "numNodes": int,
                "numProcPerNode": int,
                "resourcesPerNode": RESOURCES,
            },
            "runtimePatches": [
                {
                    "manager": str,
                    "trainingRuntimeSpec": {
                        "template": {
                            "metadata": METADATA,
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": str,
                                        "template": {
                                            "metadata": METADATA,
                                            "spec": {
                                                "template": {
                                                    "metadata": METADATA,
                                                    "spec": {
                                                        "serviceAccountName": str,
                                                        "volumes": VOLUMES,
                                                        "containers": [
                                                            {
                                                                "name": str,
                                                                "env": ENV,
                                                                "volumeMounts": MOUNTS,
                                                                "securityContext": SECURITY,
                                                            }
                                                        ],
                                                        "securityContext": POD_SECURITY,
                                                        "affinity": AFFINITY,
                                                        "tolerations": TOLERATIONS,
                                                    },
                                                }
                                            },
                                        },
                                    }
                                ]
                            },
                        }
                    },
                }
            ],
        },
    },
}


def problems(value: Any, fact: Any, place: str, found: list[tuple[Schema, Any]]) -> list[str]:
    """What is wrong at a place; what is Kubernetes' own is put to `found`."""
    if isinstance(fact, Schema):
        found.append((fact, value))
        return []
    if isinstance(fact, dict):
        if not isinstance(value, dict):
            return [f"{place} is not a table"]
        wrong = [f"{place}.{key} does not exist" for key in value if key not in fact]
        inner = [problems(value[key], fact[key], f"{place}.{key}", found) for key in value if key in fact]
        return [*wrong, *(each for part in inner for each in part)]
    if isinstance(fact, list):
        if not isinstance(value, list):
            return [f"{place} is no list"]
        return [each for n, item in enumerate(value) for each in problems(item, fact[0], f"{place}[{n}]", found)]
    if isinstance(fact, tuple):
        return [] if value in fact else [f"{place} is {value!r}, not one of {fact}"]
    is_right = isinstance(value, fact) and not (fact is int and isinstance(value, bool))
    return [] if is_right else [f"{place} is {value!r}, and wants {fact.__name__}"]
