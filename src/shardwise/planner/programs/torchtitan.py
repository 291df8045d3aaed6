"""torchtitan's settings: a TOML file, whose keys are the options too (`--parallelism.tensor_parallel_degree`)."""

import json
import tomllib
from dataclasses import replace
from typing import Any

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.programs.program import Job, Machine, Program, accumulations, rule, samples

_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
_NAMES = {name.lower(): ours for ours, name in _SCHEDULES.items()}
_RESHARD = {2: "never", 3: "always"}

_RULES = (
    rule(
        "schedules",
        lambda plan: plan.pp > 1 and plan.schedule not in _SCHEDULES,
        "torchtitan runs " + ", ".join(_SCHEDULES) + ", and not schedule={plan.schedule}",
        lambda plan: replace(plan, schedule="1f1b", chunks=None, layers=None),
    ),
    rule(
        "states alone",
        lambda plan: plan.zero == 1 or (plan.zero == 0 and plan.cp > 1),
        "torchtitan shards gradients with the states (zero=2) or weights too (zero=3), and not zero={plan.zero}",
        lambda plan: replace(plan, zero=2),
    ),
    rule(
        "parts on the host",
        lambda plan: plan.offload != Offload() and plan.offload != Offload(parameters=1.0),
        "torchtitan keeps weights, gradients and states on the host together, and no activations",
        lambda plan: replace(
            plan,
            offload=Offload(parameters=1.0 if plan.offload.optimizer or plan.offload.parameters else 0.0),
            recompute="full" if plan.offload.activations else plan.recompute,
        ),
    ),
    rule(
        "weights on the host",
        lambda plan: plan.offload.parameters and plan.zero < 2,
        "torchtitan keeps weights on the host where they are sharded",
        lambda plan: replace(plan, zero=3) if plan.dp * plan.cp > 1 else replace(plan, offload=Offload()),
    ),
    rule(
        "some layers",
        lambda plan: plan.recompute_layers is not None,
        "torchtitan recomputes all layers or none, and not recompute_layers={plan.recompute_layers}",
        lambda plan: replace(plan, recompute_layers=None),
    ),
    rule(
        "precision",
        lambda plan: plan.precision == "fp16",
        "torchtitan trains in bf16 or fp32, and not in fp16",
        lambda plan: replace(plan, precision="bf16"),
    ),
    rule(
        "order",
        lambda plan: plan.order != "pp-dp-cp-tp",
        "torchtitan has stages outermost, and not order={plan.order}",
        lambda plan: replace(plan, order="pp-dp-cp-tp"),
    ),
    rule(
        "heads for tokens",
        lambda plan: plan.cp > 1 and plan.context != "ring",
        "torchtitan's context parallelism sends keys and values around, and not context={plan.context}",
        lambda plan: replace(plan, context="ring"),
    ),
)


def write(job: Job) -> str:
    """Return the sections of the file that a plan determines."""
    plan = job.plan
    replicas = plan.dp * plan.cp
    shards = 1 if plan.zero == 0 else (plan.zero_group or replicas) // plan.cp
    size = samples(job)
    training: dict[str, Any] = {
        "local_batch_size": size * plan.microbatches if plan.pp > 1 else size,
        "global_batch_size": plan.dp * size * plan.microbatches,
        **({"seq_len": job.sequence} if job.sequence is not None else {}),
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "enable_cpu_offload": plan.offload.parameters > 0,
    }
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // max(shards, 1),
        "data_parallel_shard_degree": max(shards, 1),
        "fsdp_reshard_after_forward": _RESHARD.get(plan.zero, "default"),
        "tensor_parallel_degree": plan.tp,
        "enable_sequence_parallel": plan.sp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": _parts(plan.layers or ()),
        }
    sections = {"training": training, "parallelism": parallelism, "activation_checkpoint": {"mode": plan.recompute}}
    if plan.fp8_scales:
        sections["model"] = {"converters": ["float8"]}
        sections["quantize.linear.float8"] = {"recipe_name": f"{plan.fp8_scales}wise"}
    sections["compile"] = {"enable": True}
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each stage by torchtitan's names: embedding with the first, norm and head with the last."""
    assert layers, "torchtitan is told the modules of each stage"
    parts, begin = [], 0
    for count in layers:
        parts.append([f"layers.{index}" for index in range(begin, begin + count)])
        begin += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def read(text: str, machine: Machine) -> Job:
    """Return the plan of a file."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ShardwiseError(f"the settings are no TOML: {error}", remedy="[parallelism]") from None
    training, parallelism = tree.get("training", {}), tree.get("parallelism", {})

    def degree(name: str, usual: int = 1) -> int:
        return int(parallelism.get(name, usual))

    tp, pp, cp = (degree(f"{name}_parallel_degree") for name in ("tensor", "pipeline", "context"))
    dp = machine.replicas(tp=tp, pp=pp, cp=cp)
    copies = degree("data_parallel_replicate_degree")
    shards = degree("data_parallel_shard_degree", -1)
    shards = dp // copies if shards == -1 else shards
    if copies * shards != dp:
        raise ShardwiseError(
            f"data_parallel_replicate_degree={copies} x data_parallel_shard_degree={shards} are not the {dp} replicas "
            f"that {machine.num_devices} devices leave",
            remedy="data_parallel_shard_degree = -1",
        )
    layers = tuple(sum(name.startswith("layers.") for name in part) for part in _said_parts(parallelism)) or None
    schedule = _NAMES.get(str(parallelism.get("pipeline_parallel_schedule", "1F1B")).lower())
    if schedule is None:
        raise ShardwiseError(
            f"pipeline_parallel_schedule = {parallelism['pipeline_parallel_schedule']!r} is not known here",
            remedy=f"one of {', '.join(_SCHEDULES.values())}",
        )
    sharded = shards * cp > 1
    policy = str(parallelism.get("fsdp_reshard_after_forward", "default"))
    zero = 0 if not sharded else 2 if policy == "never" or (policy == "default" and pp > 1) else 3
    size, batch = _sizes(training, parallelism, pp, dp)
    float8 = "float8" in tree.get("model", {}).get("converters", [])
    recipe = tree.get("quantize", {}).get("linear", {}).get("float8", {}).get("recipe_name", "tensorwise")
    wide = "fp32" if training.get("mixed_precision_param") == "float32" else "bf16"
    plan = Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=degree("expert_parallel_degree"),
        sp=tp > 1 and bool(parallelism.get("enable_sequence_parallel", True)),
        schedule=schedule if pp > 1 else "1f1b", chunks=_chunks(schedule, layers, pp),
        layers=layers if pp > 1 else None, microbatches=accumulations(batch, size, dp), zero=zero,
        zero_group=shards * cp if sharded and copies > 1 else None,
        recompute=str(tree.get("activation_checkpoint", {}).get("mode", "selective")),
        offload=Offload(parameters=float(bool(training.get("enable_cpu_offload", False)))),
        precision=("fp8-rows" if recipe == "rowwise" else "fp8") if float8 else wide,
    )  # fmt: skip
    return Job(plan=plan, batch=batch, sequence=training.get("seq_len"))


def _said_parts(parallelism: dict[str, Any]) -> list[list[str]]:
    return list(parallelism.get("module_fqns_per_model_part") or [])


def _chunks(schedule: str, layers: tuple[int, ...] | None, pp: int) -> int | None:
    """Return the stages of a rank if the schedule leaves them open. The default of torch's pipelining is two."""
    if pp == 1 or schedule not in ("interleaved", "looped-bfs"):
        return None
    return len(layers) // pp if layers else 2


def _sizes(training: dict[str, Any], parallelism: dict[str, Any], pp: int, dp: int) -> tuple[int, int]:
    """Return the samples of a microbatch, and of the batch."""
    local = int(training.get("local_batch_size", 8))
    size = int(parallelism.get("pipeline_parallel_microbatch_size", 1)) if pp > 1 else local
    batch = int(training.get("global_batch_size", -1))
    return size, batch if batch > 0 else local * dp


TORCHTITAN = Program(
    name="torchtitan",
    title="torchtitan",
    file="torchtitan.toml",
    rules=_RULES,
    fixed=({"pp": 1, "zero": 3}, {"schedule": "interleaved", "zero": 2}, {"schedule": "1f1b", "zero": 2}),
    software=Software(
        by_operation=True,
        every_second=True,
        shards_parameters=True,
        fused_accumulation=False,
        gathered_once=True,
        complex_rotation=True,
    ),
    write=write,
    read=read,
    names_layers=True,
)
