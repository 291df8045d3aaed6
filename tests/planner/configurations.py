"""docs/configurations.md: what `plan` says where somebody has published what they run.

`python -m tests.planner.configurations` writes it; a test says if it is not what `plan` says.
"""

from pathlib import Path
from typing import NamedTuple

from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.planner.search.findings import find_plan
from shardwise.units import format_bytes, format_seconds

PAGE = Path(__file__).parents[2] / "docs" / "configurations.md"


class Asked(NamedTuple):
    """A question, and what was published for it: a layout as a plan of ours, seconds of a step, by whom."""

    model: str
    cluster: str
    batch: int
    sequence: int
    theirs: str
    measured: float | None
    who: str
    lora: int | None = None


ASKED = (
    Asked("llama3-8b", "8xh100", 8, 8192, "dp=8,zero=3,recompute=selective", 1.332, "torchao, FSDP2, compiled"),
    Asked("llama3-8b", "8xb200", 8, 8192, "dp=8,zero=3,recompute=selective", 0.986, "torchao, FSDP2, compiled"),
    Asked("llama3-8b", "8xmi300x", 8, 8192, "dp=8,zero=3,recompute=selective", 1.524, "torchao, FSDP2, compiled"),
    Asked("llama3.1-8b", "16x8xh100-96g-hbm2e-500w", 256, 8192, "dp=128,zero=3,recompute=selective", 2.923,
          "torchtitan, FSDP2"),
    Asked("llama3-8b", "1xh100", 32, 4096, "microbatches=16", 10.51, "Automodel", 16),
    Asked("llama3-70b", "8xh100", 32, 4096, "dp=4,tp=2,zero=3,microbatches=4,recompute=full", 15.0,
          "Automodel, FSDP2; recomputation not published", 16),
    Asked("llama3-70b", "8x8xh100", 512, 8192, "dp=2,tp=4,pp=4,cp=2,sp=true,microbatches=256,zero=1", None,
          "preset of Megatron-Bridge"),
    Asked("llama3.1-405b", "128x8xh100", 1536, 8192,
          "dp=8,tp=8,pp=8,cp=2,sp=true,chunks=8,schedule=interleaved,microbatches=192,zero=1", 37.69,
          "Megatron-Bridge, in fp8"),
    Asked("mpt-7b", "8xh100", 48, 2048, "dp=8,zero=3", 1.155, "llm-foundry, FSDP"),
    Asked("mpt-30b", "4x8xh100", 1344, 2048, "dp=32,zero=3,microbatches=3,recompute=full", 37.27, "llm-foundry, FSDP"),
    Asked("internlm-7b", "8xa100-80g", 64, 2048, "dp=8,zero=1,microbatches=4", 4.033, "InternEvo"),
    Asked("gpt3-175b", "8x8xa100-80g", 64, 2048,
          "tp=8,pp=8,sp=true,chunks=3,schedule=interleaved,microbatches=64,recompute=full", 18.13,
          "Korthikanti 2022, without flash attention"),
    Asked("qwen3-30b-a3b", "8xh100", 512, 4096, "dp=8,ep=8,zero=3,microbatches=16", 21.77, "Automodel, FSDP2"),
    Asked("qwen3-30b-a3b", "2x8xh100", 1024, 4096, "dp=16,ep=16,zero=1,microbatches=64", 20.15, "Megatron-Bridge"),
    Asked("qwen3-235b-a22b", "32x8xh100", 2048, 4096,
          "dp=16,tp=2,pp=8,ep=16,sp=true,chunks=4,schedule=interleaved,microbatches=128,zero=1,recompute=selective",
          19.7, "MoE model zoo, with ep=32"),
    Asked("gpt-oss-120b", "8x8xh100", 1280, 4096, "dp=16,pp=4,ep=8,microbatches=80,zero=1", 14.07, "Megatron-Bridge"),
    Asked("gpt-oss-120b", "8x8xb200", 1280, 4096, "dp=64,ep=8,microbatches=5,zero=1", 6.04, "Megatron-Bridge"),
    Asked("deepseek-v3", "32x8xh100", 512, 4096,
          "dp=64,pp=4,ep=64,chunks=8,schedule=interleaved,microbatches=8,zero=3", 8.18, "Automodel, FSDP2"),
    Asked("mixtral-8x7b", "8x8xh100", 512, 4096, "dp=16,pp=4,ep=8,microbatches=32,zero=1", None,
          "preset of Megatron-Bridge"),
    Asked("moonlight-16b-a3b", "8xh100", 4, 4096, "dp=4,tp=2,ep=4,sp=true,zero=1", 0.457, "Megatron-Bridge, with ep=8"),
)  # fmt: skip

_INTRODUCTION = """# Twenty configurations

This page compares the answers of `shardwise plan` for common models and clusters with what was published for the same
model, devices and batch.

- **Published layouts** are written as our plans and priced for our own engine. Our engine keeps fp32 master weights
  beside 16-bit weights, and gathered inputs. So a layout may not fit here although it fits in the other program; the
  column "the same in our engine" then says how much memory is missing.
- **Measured times** are those of the named program, with its own kernels.
- **LoRA** is `--lora 16`.
- **The answer** is the simplest plan within 3 % of the fastest. Plans with sequence shards shorter than any that were
  published, and plans that use the host, have to gain more ([planning.md](planning.md)).
- **A 405B on 1,024 H100** gets a pipeline twice as deep as Meta's. Four tensor parallel ranks wait less for their
  all-reduces than eight. Megatron partly hides this wait, and our engine does not. With `tp=8,pp=16` the step is
  predicted 8.6 % longer, and with half of the activations on the host 2.7 % shorter.
- **Mixtures of experts** are priced by the kernel launches that were counted in the layers of our engine; no such step
  was timed on GPUs. With a small batch (Moonlight), launches determine the step time.

    python -m tests.planner.configurations        # writes this page

| question | `plan` answers | step | published | the same in our engine | measured there |
|---|---|---|---|---|---|
"""


def line(asked: Asked) -> str:
    """One row: the question, our answer, theirs."""
    question = make_question(
        asked.model, cluster=asked.cluster, batch=asked.batch, sequence=asked.sequence, lora=asked.lora
    )
    best = find_plan(question).best
    plan = str(best.plan).replace(",precision=bf16", "")
    low, high = format_seconds(best.low), format_seconds(best.high)
    name = f"{asked.model}, LoRA" if asked.lora else asked.model
    cells = [
        f"{name}, {asked.cluster}, {asked.batch} x {asked.sequence}",
        f"`{plan}`",
        f"{format_seconds(best.seconds)} ({low} to {high})",
    ]
    theirs = account(question, Plan.parse(f"{asked.theirs},precision=bf16"))
    short = "" if theirs.fits else f", {format_bytes(max(-theirs.fullest.headroom, 0.0))} short"
    measured = "" if asked.measured is None else f"{asked.measured:g} s"
    return _row([*cells, f"`{asked.theirs}` ({asked.who})", f"{format_seconds(theirs.seconds)}{short}", measured])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    return _INTRODUCTION + "".join(line(asked) for asked in ASKED)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
