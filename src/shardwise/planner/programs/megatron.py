"""Megatron-LM's arguments (those of `pretrain_gpt.py`, release core 0.16)."""

import re
import shlex
from dataclasses import replace

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.programs.program import Job, Machine, Program, accumulations, rule, samples

_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_FP8 = {"tensorwise": "fp8", "delayed": "fp8"}


def _plain(plan: Plan) -> Plan:
    """Return the plan with the nearest schedule: interleaved if it has chunks and microbatches fill whole rounds."""
    if (plan.num_chunks or 1) > 1 and plan.microbatches % plan.pp == 0:
        return replace(plan, schedule="interleaved", chunks=plan.num_chunks, layers=None)
    return replace(plan, schedule="1f1b", chunks=None, layers=None)


_RULES = (
    rule(
        "schedules",
        lambda plan: plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"),
        "Megatron-LM runs 1F1B, with or without virtual stages, and not schedule={plan.schedule}",
        _plain,
    ),
    rule(
        "rounds of microbatches",
        lambda plan: plan.pp > 1 and plan.schedule == "interleaved" and plan.microbatches % plan.pp,
        "with virtual stages Megatron-LM wants microbatches in rounds of pp={plan.pp}, and there are"
        " {plan.microbatches}",
        lambda plan: replace(plan, schedule="1f1b", chunks=None, layers=None),
    ),
    rule(
        "what is on the host",
        lambda plan: plan.offload.parameters or plan.offload.activations,
        "Megatron-LM keeps optimizer states on the host and neither weights nor activations of all layers",
        lambda plan: replace(
            plan,
            offload=Offload(optimizer=1.0 if plan.offload.parameters else plan.offload.optimizer),
            recompute="full" if plan.offload.activations else plan.recompute,
        ),
    ),
    rule(
        "sharded gradients in pipelines",
        lambda plan: plan.zero >= 2 and plan.pp > 1,
        "Megatron-FSDP (zero={plan.zero}) has no pipelines",
        lambda plan: replace(plan, zero=1),
    ),
    rule(
        "groups of sharded weights",
        lambda plan: plan.zero_group is not None and plan.zero != 1,
        "Megatron-LM shards states over groups of replicas with zero=1, and not with zero={plan.zero}",
        lambda plan: replace(plan, zero_group=None),
    ),
    rule(
        "scales of rows",
        lambda plan: plan.precision == "fp8-rows",
        "Megatron-LM has scales of tensors or of blocks, and not of rows",
        lambda plan: replace(plan, precision="fp8"),
    ),
    rule(
        "sp without a reason",
        lambda plan: plan.ep > 1 and plan.tp > 1 and not plan.sp,
        "Megatron-LM wants sequence parallelism where experts and tp are used together",
        lambda plan: replace(plan, sp=True),
    ),
)


def write(job: Job) -> str:
    """Return the arguments, one per line."""
    plan = job.plan
    sizes: list[tuple[str, object]] = [
        ("tensor-model-parallel-size", plan.tp),
        ("pipeline-model-parallel-size", plan.pp),
        ("context-parallel-size", plan.cp),
        ("micro-batch-size", samples(job)),
        ("global-batch-size", plan.dp * samples(job) * plan.microbatches),
    ]
    if job.sequence is not None:
        sizes.append(("seq-length", job.sequence))
    if plan.ep > 1:
        sizes += [("expert-model-parallel-size", plan.ep), ("expert-tensor-parallel-size", plan.tp)]
    if plan.cp > 1:
        sizes.append(("cp-comm-type", "a2a" if plan.context == "all-to-all" else "p2p"))
    chunks = plan.chunks or plan.num_chunks or 1
    if plan.layers is not None and len(set(plan.layers)) > 1:
        sizes.append(("pipeline-model-parallel-layout", _layout(plan.layers)))
    elif plan.pp > 1 and chunks > 1:
        sizes.append(("num-virtual-stages-per-pipeline-rank", chunks))
    lines = [f"--{name} {shlex.quote(str(value))}" for name, value in sizes]
    return "\n".join([*lines, *_switches(plan)]) + "\n"


def _layout(layers: tuple[int, ...]) -> str:
    """Return the layers of each stage: E is the embedding, t a layer, L the loss."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def _switches(plan: Plan) -> list[str]:
    found = []
    if plan.sp:
        found.append("--sequence-parallel")
    if plan.ep > 1:
        # By default Megatron gathers all rows on all ranks, and multiplies experts one by one.
        found.append("--moe-token-dispatcher-type alltoall --moe-grouped-gemm")
    if plan.zero == 1:
        found.append("--use-distributed-optimizer")
        if plan.zero_group is not None:
            found.append(f"--num-distributed-optimizer-instances {plan.dp * plan.cp // plan.zero_group}")
    if plan.zero >= 2:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_SHARDED[plan.zero]}"]
    if plan.recompute == "full":
        method, count = ("block", plan.recompute_layers) if plan.recompute_layers else ("uniform", 1)
        found.append(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {count}")
    if plan.recompute == "selective":
        found.append("--recompute-granularity selective")
    if plan.offload.optimizer:
        found.append(f"--optimizer-cpu-offload --optimizer-offload-fraction {plan.offload.optimizer:g}")
    if plan.precision in ("bf16", "fp16"):
        found.append(f"--{plan.precision}")
    if plan.precision == "fp8":
        found.append("--bf16 --fp8-format hybrid --fp8-recipe tensorwise")
    if plan.order == "dp-pp-cp-tp":
        found.append("--use-tp-pp-dp-mapping")
    return found


#: Arguments any of which identifies a command line as Megatron-LM's.
TELLING = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
    "micro-batch-size", "global-batch-size", "seq-length", "sequence-parallel", "use-distributed-optimizer",
    "use-megatron-fsdp", "recompute-granularity", "optimizer-cpu-offload", "bf16", "fp16", "fp8-format",
)  # fmt: skip


def read(text: str, machine: Machine) -> Job:
    """Return the plan of a command line, which may have any other arguments too."""
    said = _arguments(text)

    def count(name: str, usual: int) -> int:
        value = said.get(name)
        if value is None:
            return usual
        if not value.isdecimal() or int(value) < 1:
            raise ShardwiseError(f"--{name} {value} wants a number of 1 or more", remedy=f"--{name} {usual}")
        return int(value)

    tp, pp, cp = (count(f"{name}-parallel-size", 1) for name in ("tensor-model", "pipeline-model", "context"))
    dp = machine.replicas(tp=tp, pp=pp, cp=cp)
    size = count("micro-batch-size", 1)
    batch = count("global-batch-size", 0) or None
    layers, chunks = _stages(said, machine, pp)
    instances = count("num-distributed-optimizer-instances", 1)
    zero = 1 if "use-distributed-optimizer" in said else 0
    if "use-megatron-fsdp" in said:
        strategy = said.get("data-parallel-sharding-strategy") or "optim_grads_params"
        zero = {"no_shard": 0, "optim": 1, **{word: stage for stage, word in _SHARDED.items()}}.get(strategy, 3)
    precision = "bf16" if "bf16" in said else "fp16" if "fp16" in said else "fp32"
    if "fp8-format" in said:
        precision = _FP8.get(said.get("fp8-recipe") or "delayed", "fp8")
    plan = Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=count("expert-model-parallel-size", 1), sp="sequence-parallel" in said,
        context="all-to-all" if said.get("cp-comm-type") == "a2a" else "ring", chunks=chunks if chunks > 1 else None,
        schedule="interleaved" if chunks > 1 else "1f1b", microbatches=accumulations(batch, size, dp), layers=layers,
        zero=zero, zero_group=dp * cp // instances if instances > 1 else None,
        recompute=said.get("recompute-granularity") or "none",
        recompute_layers=count("recompute-num-layers", 1) if said.get("recompute-method") == "block" else None,
        offload=Offload(optimizer=_fraction(said)), precision=precision,
        order="dp-pp-cp-tp" if "use-tp-pp-dp-mapping" in said else "pp-dp-cp-tp",
    )  # fmt: skip
    return Job(plan=plan, batch=batch or dp * size, sequence=count("seq-length", 0) or None)


def _fraction(said: dict[str, str | None]) -> float:
    if "optimizer-cpu-offload" not in said:
        return 0.0
    return float(said.get("optimizer-offload-fraction") or 1.0)


def _stages(said: dict[str, str | None], machine: Machine, pp: int) -> tuple[tuple[int, ...] | None, int]:
    """Return the layers of each stage if given, and the number of stages of a rank."""
    layout = said.get("pipeline-model-parallel-layout")
    if layout:
        # As Megatron unrolls it: (tt|)*29 and t*3.
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout.replace(",", ""))
        layers = tuple(stage.count("t") for stage in layout.split("|"))
        return layers, max(len(layers) // pp, 1)
    if "num-virtual-stages-per-pipeline-rank" in said:
        return None, int(said["num-virtual-stages-per-pipeline-rank"] or 1)
    if "num-layers-per-virtual-pipeline-stage" in said:
        return None, max(machine.num_layers // pp // int(said["num-layers-per-virtual-pipeline-stage"] or 1), 1)
    return None, 1


def _arguments(text: str) -> dict[str, str | None]:
    """Return arguments by name; a switch has None."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ShardwiseError(
            f"the arguments cannot be read: {error}", remedy='"--tensor-model-parallel-size 8"'
        ) from None
    found: dict[str, str | None] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else None
        elif name is not None and found[name] is None:
            found[name] = word
    return found


#: What Megatron-Core with Transformer Engine fuses and overlaps.
SOFTWARE = Software(async_tp=True, overlap_tp=True, overlap_hops=True, fused_loss=True, attention="flash3")

MEGATRON = Program(
    name="megatron",
    title="Megatron-LM",
    file="arguments of pretrain_gpt.py",
    rules=_RULES,
    fixed=({"schedule": "1f1b", "zero": 1}, {"schedule": "interleaved", "zero": 1}),
    software=SOFTWARE,
    write=write,
    read=read,
    names_layers=False,
)
