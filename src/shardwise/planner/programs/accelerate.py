"""Accelerate's configuration file: DDP, or FSDP2 with tensor and context parallel ranks."""

import json
import re
from dataclasses import replace

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.programs.program import Job, Machine, Program, rule, samples, without_pipelines
from shardwise.units import counted

_RULES = (
    rule(
        "pipelines",
        lambda plan: plan.pp > 1,
        "Accelerate trains without pipelines, and not with pp={plan.pp}",
        without_pipelines,
    ),
    rule(
        "experts",
        lambda plan: plan.ep > 1,
        "Accelerate's file has no expert parallel ranks",
        lambda plan: replace(plan, ep=1),
    ),
    rule(
        "sequence parallelism",
        lambda plan: plan.sp,
        "under Accelerate whether sequences are cut between layers is the model's plan, not the file's",
        lambda plan: replace(plan, sp=False),
    ),
    rule(
        "states alone",
        lambda plan: plan.zero == 1 or (plan.zero == 0 and (plan.tp > 1 or plan.cp > 1)),
        "FSDP2 shards gradients with the states (zero=2) or weights too (zero=3), and not zero={plan.zero}",
        lambda plan: replace(plan, zero=2 if plan.dp * plan.cp > 1 else 3),
    ),
    rule(
        "nobody to shard over",
        lambda plan: plan.zero >= 2 and plan.dp * plan.cp == 1,
        "tp={plan.tp} alone has no replicas that could share states out",
        lambda plan: replace(plan, dp=plan.dp * plan.tp, tp=1, sp=False),
    ),
    rule(
        "parts on the host",
        lambda plan: plan.offload != Offload() and (plan.offload != Offload(parameters=1.0) or plan.zero != 3),
        "FSDP2 keeps weights, gradients and states on the host together, and no activations",
        lambda plan: replace(
            plan,
            zero=3 if plan.offload.optimizer or plan.offload.parameters else plan.zero,
            offload=Offload(parameters=1.0 if plan.offload.optimizer or plan.offload.parameters else 0.0),
            recompute="full" if plan.offload.activations else plan.recompute,
        ),
    ),
    rule(
        "what is recomputed",
        lambda plan: plan.recompute == "selective" or plan.recompute_layers is not None,
        "Accelerate recomputes whole layers, all or none",
        lambda plan: replace(plan, recompute="full", recompute_layers=None),
    ),
    rule(
        "recomputation without shards",
        lambda plan: plan.recompute == "full" and plan.zero == 0,
        "recomputation is a setting of FSDP in Accelerate's file",
        lambda plan: replace(plan, zero=2 if plan.dp * plan.cp > 1 else 0, recompute="full" if plan.dp > 1 else "none"),
    ),
    rule(
        "scales of rows",
        lambda plan: plan.fp8_scales == "row",
        "Accelerate's fp8 has a scale for a tensor",
        lambda plan: replace(plan, precision="fp8"),
    ),
    rule(
        "order and heads",
        lambda plan: plan.order != "pp-dp-cp-tp" or plan.context != "ring",
        "Accelerate has replicas outermost, and keys and values go around",
        lambda plan: replace(plan, order="pp-dp-cp-tp", context="ring"),
    ),
)


def write(job: Job) -> str:
    """Return the file, with comments on what the script has to set."""
    plan = job.plan
    sharded = plan.zero >= 2
    shards = (plan.zero_group or plan.dp * plan.cp) // plan.cp if sharded else 1
    lines = [
        f"# In the script: {counted(samples(job), 'sample')} a process and Accelerator(gradient_accumulation_steps="
        f"{plan.microbatches})",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU' if plan.num_ranks > 1 else 'NO'}",
        f"mixed_precision: {json.dumps('no' if plan.precision == 'fp32' else plan.precision)}",
        f"num_processes: {plan.num_ranks}",
    ]
    if sharded:
        fsdp = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.zero == 3,
            "fsdp_offload_params": plan.offload.parameters > 0,
            "fsdp_activation_checkpointing": plan.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        mesh = {"dp_replicate_size": plan.dp // shards, "dp_shard_size": shards, "tp_size": plan.tp, "cp_size": plan.cp}
        lines += ["fsdp_config:", *(f"  {key}: {json.dumps(value)}" for key, value in fsdp.items())]
        lines += ["parallelism_config:", *(f"  parallelism_config_{key}: {value}" for key, value in mesh.items())]
    return "\n".join(lines) + "\n"


def read(text: str, machine: Machine) -> Job:
    """Return the plan of a file."""
    said = _values(text)
    tp, cp = (int(said.get(f"parallelism_config_{axis}_size", "1")) for axis in ("tp", "cp"))
    dp = machine.replicas(tp=tp, cp=cp)
    kind = said.get("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "NO", "MULTI_CPU"):
        raise ShardwiseError(
            f"distributed_type: {kind} is not read here", remedy="FSDP, MULTI_GPU, or DeepSpeed's own ds_config.json"
        )
    sharded = kind == "FSDP" and dp * cp > 1
    shards = int(said.get("parallelism_config_dp_shard_size", str(dp)))
    steps = re.search(r"gradient_accumulation_steps\s*[=:]\s*(\d+)", text)
    size = re.search(r"(\d+) samples? a process", text)
    count = int(steps[1]) if steps else 1
    word = said.get("mixed_precision", "no")
    plan = Plan(
        dp=dp, tp=tp, cp=cp, microbatches=count,
        zero=0 if not sharded else 2 if said.get("fsdp_reshard_after_forward") in ("false", "SHARD_GRAD_OP") else 3,
        zero_group=shards * cp if sharded and shards < dp else None,
        recompute="full" if said.get("fsdp_activation_checkpointing") == "true" else "none",
        offload=Offload(parameters=float(said.get("fsdp_offload_params") == "true")),
        precision="fp32" if word in ("no", "null") else word,
    )  # fmt: skip
    return Job(plan=plan, batch=dp * count * int(size[1]) if size else None, sequence=None)


def _values(text: str) -> dict[str, str]:
    """Return keys and values of all levels: names are unique across them."""
    found = {}
    for line in text.splitlines():
        matched = re.match(r"\s*([\w-]+):\s*([^#]*)", line)
        if matched is not None and not line.lstrip().startswith("#"):
            value = matched[2].strip().strip("\"'")
            found[matched[1]] = value.lower() if value.lower() in ("true", "false") else value
    return found


ACCELERATE = Program(
    name="accelerate",
    title="Accelerate",
    file="accelerate.yaml",
    rules=_RULES,
    fixed=tuple({"pp": 1, "ep": 1, "zero": stage} for stage in (2, 3)),
    software=Software(
        fused=False, fused_norms=False, by_operation=True, shards_parameters=True, fused_accumulation=False
    ),
    write=write,
    read=read,
)
