"""DeepSpeed's `ds_config.json`: ZeRO and offload. Other axes are set up in code, not in this file."""

import json
from dataclasses import replace
from typing import Any

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.programs.program import Job, Machine, Program, accumulations, rule, samples, without_pipelines


def _replicated(plan: Plan) -> Plan:
    """Return a plan for the same devices with replicas in place of all other axes."""
    plan = without_pipelines(plan)
    return replace(
        plan, dp=plan.num_ranks, tp=1, cp=1, ep=1, sp=False, context="ring", microbatches=1, zero=max(plan.zero, 1)
    )


_RULES = (
    rule(
        "axes",
        lambda plan: plan.tp * plan.pp * plan.cp * plan.ep > 1,
        "ds_config.json has replicas alone: tp, pp, cp and ep are made in code under DeepSpeed",
        _replicated,
    ),
    rule(
        "groups",
        lambda plan: plan.zero_group is not None,
        "DeepSpeed shards states over all replicas, and not over zero_group={plan.zero_group}",
        lambda plan: replace(plan, zero_group=None),
    ),
    rule(
        "one replica",
        lambda plan: plan.zero and plan.dp == 1,
        "zero={plan.zero} shards over replicas, and there is one",
        lambda plan: replace(plan, zero=0, offload=Offload()),
    ),
    rule(
        "activations on the host",
        lambda plan: plan.offload.activations,
        "DeepSpeed sends the inputs of recomputed layers to the host, and not all activations",
        lambda plan: replace(plan, offload=replace(plan.offload, activations=0.0), recompute="full"),
    ),
    rule(
        "weights on the host",
        lambda plan: plan.offload.parameters and (plan.zero != 3 or plan.offload != Offload(parameters=1.0)),
        "DeepSpeed keeps weights on the host with zero=3, all of them, and their states too",
        lambda plan: replace(plan, zero=3, offload=Offload(parameters=1.0)),
    ),
    rule(
        "states on the host",
        lambda plan: 0 < plan.offload.optimizer < 1 or (plan.offload.optimizer and not plan.zero),
        "DeepSpeed keeps all sharded states on the host, and not offload.optimizer={plan.offload.optimizer:g}",
        lambda plan: replace(plan, zero=max(plan.zero, 1), offload=replace(plan.offload, optimizer=1.0)),
    ),
    rule(
        "what is recomputed",
        lambda plan: plan.recompute == "selective" or plan.recompute_layers is not None,
        "DeepSpeed recomputes whole layers, all or none",
        lambda plan: replace(plan, recompute="full", recompute_layers=None),
    ),
    rule(
        "precision",
        lambda plan: plan.fp8_scales,
        "DeepSpeed trains in bf16, fp16 or fp32, and not in {plan.precision}",
        lambda plan: replace(plan, precision="bf16"),
    ),
    rule(
        "order",
        lambda plan: plan.order != "pp-dp-cp-tp",
        "with replicas alone there is no order={plan.order}",
        lambda plan: replace(plan, order="pp-dp-cp-tp"),
    ),
)


def write(job: Job) -> str:
    """Return the file."""
    plan = job.plan
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": True, "contiguous_gradients": True}
    host = {"device": "cpu", "pin_memory": True}
    if plan.offload.parameters:
        zero |= {"offload_param": host, "offload_optimizer": host}
    elif plan.offload.optimizer:
        zero["offload_optimizer"] = host
    tree: dict[str, Any] = {
        "train_batch_size": plan.dp * samples(job) * plan.microbatches,
        "train_micro_batch_size_per_gpu": samples(job),
        "gradient_accumulation_steps": plan.microbatches,
        "zero_optimization": zero,
        "bf16": {"enabled": plan.precision == "bf16"},
        "fp16": {"enabled": plan.precision == "fp16"},
    }
    if plan.recompute == "full":
        # Settings of `deepspeed.checkpointing`, which the model has to call (or `gradient_checkpointing_enable()`).
        tree["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return json.dumps(tree, indent=2) + "\n"


def read(text: str, machine: Machine) -> Job:
    """Return the plan of a file."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ShardwiseError(
            f"the file is not valid JSON: {error}", remedy='{"zero_optimization": {"stage": 3}}'
        ) from None
    zero, dp = tree.get("zero_optimization", {}), machine.num_devices
    size, steps, batch = (
        _number(tree, name)
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    # DeepSpeed derives the third from any two.
    if batch is None:
        batch = (size or 1) * (steps or 1) * dp
    if size is None:
        size = max(batch // (dp * (steps or 1)), 1)
    stage = int(zero.get("stage", 0)) if dp > 1 else 0
    weights = _on_host(zero, "offload_param")
    plan = Plan(
        dp=dp,
        microbatches=accumulations(batch, size, dp),
        zero=stage,
        recompute="full" if "activation_checkpointing" in tree else "none",
        offload=Offload(parameters=weights, optimizer=0.0 if weights else _on_host(zero, "offload_optimizer")),
        precision=next(
            (name for name in ("bf16", "fp16") if tree.get(name, {}).get("enabled") not in (None, False)), "fp32"
        ),
    )
    return Job(plan=plan, batch=batch, sequence=None)


def _number(tree: dict[str, Any], name: str) -> int | None:
    """Return a number; None if the file leaves it to the trainer ("auto")."""
    value = tree.get(name)
    return None if value in (None, "auto") else int(value)


def _on_host(zero: dict[str, Any], name: str) -> float:
    return float((zero.get(name) or {}).get("device", "none") != "none")


DEEPSPEED = Program(
    name="deepspeed",
    title="DeepSpeed",
    file="ds_config.json",
    rules=_RULES,
    fixed=tuple({"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": stage} for stage in (1, 2, 3)),
    software=Software(fused=False, fused_norms=False, fused_accumulation=False),
    write=write,
    read=read,
)
