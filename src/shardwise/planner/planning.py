"""`plan`: the best plan for a model on a cluster, with the reason for every choice.

plan = sw.plan("llama3-70b", cluster="8x8xh100", batch=512, sequence=8192)
print(plan.explain())
plan.save("plan.toml")

plan = sw.plan(module, cluster=local_cluster(2), batch=16, example=batch)      # any module, on this computer
engine = sw.parallelize(module, plan, loss=loss, optimizer=AdamW, example=batch)
"""

from collections.abc import Mapping
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.cost.software import Software
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.planner.search.findings import find_plan


def plan(
    model: Any,
    *,
    cluster: Cluster | str,
    batch: int,
    sequence: int | None = None,
    example: Any = None,
    fixed: Mapping[str, Any] | None = None,
    runnable: bool = True,
    software: Software | None = None,
    lora: int | None = None,
) -> Plan:
    """Return the fastest plan for a training step of `batch` samples on all devices of a cluster.

    `model` is a name in the catalogue, the path of a `config.json`, `package.module:factory`, a `Model`, or a module. A
    module with a Hugging Face configuration of a known family is planned by its configuration. Any other is traced with
    `example`, a batch for its forward; `sequence` is then the example's. `cluster` is a `Cluster`, its name, or the
    path of a `cluster.toml`; `local_cluster(n)` is n processes on this computer.

    `fixed` are keys of the plan that are given: `{"tp": 8}`. With `runnable=False`, plans that the engines cannot run
    yet also count. `software` says what is fused, overlapped and stored in which precision. With `lora`, only adapters
    of that rank train. In a traced module, parameters that require no gradient are frozen.
    """
    question = make_question(
        model,
        cluster=cluster,
        batch=batch,
        sequence=sequence,
        example=example,
        fixed=fixed,
        runnable=runnable,
        software=software,
        lora=lora,
    )
    return find_plan(question).plan
