"""The model of a published run, and the software that ran it, from its row in the table.

Programs with the same layout differ in what they fuse, overlap and store in which precision. A row states this in its
notes, its detail, or by the name (and release) of its program. This module looks it up. It has no fitted numbers, and
no source has its own correction factor.
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from shardwise.cost.software import Software
from shardwise.model.adapters import with_lora
from shardwise.model.catalogue import CATALOGUE, find_name, get_model
from shardwise.model.config import read_config
from shardwise.model.describe import Sizes, describe
from shardwise.model.model import Model
from shardwise.model.operations import Matmul
from shardwise.model.prediction import with_prediction
from shardwise.planner.runs import Run, SkippedError, pool_of

# Megatron-LM pads GPT-2's vocabulary of 50257 to 51200 for 8 tensor parallel ranks: the default of rows without one.
_USUAL_VOCABULARY = 51200
# The rank of adapters that PEFT and most recipes use, or twice that.
_USUAL_RANK = 16

# Megatron-LM of 2021: fused softmax, no flash attention, fp16, one reduction of gradients at the end of the step.
_MEGATRON_2021 = Software(
    precision="fp16",
    attention="megatron",
    overlap_gradients=False,
    overlap_parameters=False,
    reduce_bytes=2,
    gradient_bytes=4,
    fused_loss=True,
)
# Megatron-LM of 2022 (Korthikanti et al.): tensor parallel reductions overlap with weight gradients.
_MEGATRON_2022 = replace(_MEGATRON_2021, async_tp=True, reduce_bytes=4)
# Megatron-DeepSpeed as in the preparation of BLOOM: DeepSpeed's pipeline, which splits sent activations over tensor
# parallel ranks (`is_pipe_partitioned`), gradients in fp16 (bf16 runs: in fp32 too), CUDA_LAUNCH_BLOCKING=1 on 40 nodes
# and more (NOTES.md).
_MEGATRON_DEEPSPEED = replace(
    _MEGATRON_2021,
    gradient_bytes=2,
    fused_accumulation=False,
    interpreted_pipe=True,
    fresh_buffers=True,
    fused_loss=False,
    state_bytes=16,
)
# Aleph Alpha's training of Llama (arXiv 2311.05610): kernels as the row names them, elementwise operations of torch. By
# its source (Aleph-Alpha/scaling), gradients are all-reduced in fp32 after the last backward although states are
# sharded, and whole activations are sent.
_ALEPH_ALPHA = Software(
    attention="flash2",
    fused=False,
    fused_norms=False,
    overlap_gradients=False,
    overlap_parameters=False,
    fused_accumulation=False,
    gradient_bytes=2,
    reduce_bytes=4,
    scatters_gradients=False,
    fresh_buffers=True,
    parallel_loss=False,
    split_hops=False,
)
# llm-foundry: FSDP1, FlashAttention, norms in low precision, elementwise operations of torch. `mp=PURE` reduces in
# bf16.
_LLM_FOUNDRY = Software(attention="flash1", fused=False, gradient_bytes=4, reduce_bytes=4, fused_loss=True)
# Megatron-Core with Transformer Engine: cuDNN attention, fused kernels, all possible overlap.
_MEGATRON_CORE = Software(
    attention="flash3", async_tp=True, overlap_tp=True, overlap_hops=True, cuda_graphs=True, fused_loss=True,
    registered_buffers=True,
)  # fmt: skip
# NanoTron: FlashAttention 2, gradients in fp32, overlapped. InternEvo: gradients in bf16, the type
# of compute (its source: buckets are reduced in their own type).
_NANOTRON = Software(attention="flash2", fused_loss=False)
_INTERNEVO = replace(_NANOTRON, gradient_bytes=2, reduce_bytes=2)

# Megatron-Core without the overlap and CUDA graphs of its recipes: SimuMax's runs, by their notes.
_MEGATRON_PLAIN = replace(
    _MEGATRON_CORE, async_tp=False, overlap_tp=False, overlap_hops=False, overlap_gradients=False,
    overlap_parameters=False, cuda_graphs=False,
)  # fmt: skip
# FSDP2 with torch's own kernels, as in torchtitan and torchao: gradients reduced in fp32, selective recomputation by
# operation, nothing fused unless compiled. Automodel adds Transformer Engine.
_FSDP2 = Software(
    attention="flash2",
    fused_loss=False,
    by_operation=True,
    every_second=True,
    complex_rotation=True,
    shards_parameters=True,
    fused_accumulation=False,
    gathered_once=True,
)
_AUTOMODEL = replace(_FSDP2, attention="flash3", fused_loss=True, every_second=False, complex_rotation=False)

# Recipes of Megatron-Bridge and of the model zoo for mixtures of experts store gradients and moments in bf16, and
# master weights in fp32 (precision-aware optimizer, M).
_PRECISION_AWARE: dict[str, Any] = {"gradient_bytes": 2, "reduce_bytes": 2, "state_bytes": 8}

# Automodel's mixtures reshard and reduce once a step (`MoEFSDPSyncMixin`, its source). In its benchmarks, Adam updates
# bf16 weights, without master weights (M).
_AUTOMODEL_MIXTURE: dict[str, Any] = {"stays_gathered": True, "gradient_bytes": 2, "state_bytes": 4}

_PROGRAMS = (
    ("ModelZoo", replace(_MEGATRON_CORE, cuda_graphs=False)),
    ("SimuMax", _MEGATRON_PLAIN),
    ("torchtitan", _FSDP2),
    ("pytorch/ao", _FSDP2),
    ("Automodel", _AUTOMODEL),
    ("llm-foundry", _LLM_FOUNDRY),
    ("Aleph-Alpha", _ALEPH_ALPHA),
    ("bigscience", _MEGATRON_DEEPSPEED),
    ("Zero Bubble", replace(_MEGATRON_2022, steps_overlap=True)),
    ("Korthikanti", _MEGATRON_2022),
    ("Megatron-Bridge", _MEGATRON_CORE),
    ("mcore", _MEGATRON_CORE),
    ("nanotron", _NANOTRON),
    ("InternEvo", _INTERNEVO),
    ("Megatron", _MEGATRON_2021),
)
# Programs whose GPT trains with dropout, as Megatron-LM's does.
_WITH_DROPOUT = ("Megatron SC21", "Megatron-LM git", "MT-NLG", "Zero Bubble", "Korthikanti")
# Names of precisions in rows, and our names for them.
_PRECISIONS = {each: each for each in ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")}
_PRECISIONS |= {"fp8-cs": "fp8", "fp8-mx": "mxfp8"}
_KERNELS = {"torch": "torch", "fused": "megatron", "flash_attention": "flash1", "flash_attentionv1.0.8": "flash1"}


def software_of(run: Run) -> Software:
    """Return the software that a run names; without a name, the defaults of `Software`."""
    source = run.text("source")
    found = next((software for word, software in _PROGRAMS if word.lower() in source.lower()), Software())
    precision = _PRECISIONS[run.choice("precision", _PRECISIONS, found.precision)]
    found = replace(found, precision=precision)
    kernel = re.search(r"attn_kernel=([^;]*)", run.text("detail"))
    if kernel is not None:
        name = kernel[1].split(" + ")[0].strip()
        found = replace(found, attention=_KERNELS.get(name, "flash2"), fused_norms="RMS" in kernel[1])
    if found.every_second:
        compiled = run.text("compiled").strip().lower() == "true"
        asynchronous = "async_tp=True" in run.text("detail")
        cast = 10 if "rowwise" in run.text("notes") else 6
        found = replace(found, fused=compiled, fused_norms=compiled, overlap_tp=asynchronous, cast_bytes=cast)
        # Since spring 2025 the loss is compiled too. No row states its release: runs on newer devices are assumed to
        # be newer.
        later = pool_of(run).device.architecture not in ("ampere", "hopper")
        found = replace(found, fused_loss=compiled and later)
    if "mp=PURE" in run.text("data_parallel"):
        found = replace(found, reduce_bytes=2)
    if "Megatron-Bridge" in source and "performance-summary" in source:
        # Recipes of its tables (scripts/performance) reduce gradients in bf16, and gather fp8 weights in fp8.
        found = replace(found, gradient_bytes=2, reduce_bytes=2, narrow_gathers=True)
    if "DeepSpeed" in source or "bigscience" in source.lower():
        found = replace(
            found,
            blocking_launches=run.count("num_gpus") >= 320,
            gradient_bytes=6 if "fp32 grad" in run.text("notes") else 2,
        )
    return _with_experts(found, run)


def balance_of(run: Run) -> str:
    """Return how layers are distributed: as the program does; else `even` or `ends` if that divides, or by weight.

    By their sources, Aleph Alpha's program counts embedding, norm and head as layers, and DeepSpeed fills stages from
    the first on.
    """
    layers, pp, source = run.count("layers", 0), run.count("pp"), run.text("source").lower()
    if "aleph-alpha" in source:
        return "slots"
    if layers % pp == 0:
        return "even"
    if (layers + 2) % pp == 0:
        return "ends"
    return "front" if "bigscience" in source else "weight"


def _with_experts(software: Software, run: Run) -> Software:
    """Add the software of experts: the row's dispatch; for Megatron-Bridge, the release's overlap and CUDA graphs."""
    if run.text("arch") != "moe":
        return software
    if software is _MEGATRON_PLAIN or "bridge" not in run.text("source").lower():
        fast = "DeepEP" in run.text("notes") + run.text("detail")
        name = run.text("source").lower()
        known = _AUTOMODEL_MIXTURE if "automodel" in name else _PRECISION_AWARE if "modelzoo" in name else {}
        return replace(software, fast_dispatch=fast, **known)
    notes = run.text("notes")
    release = re.search(r"\[(\d\d\.\d\d)", run.text("source"))
    # HybridEP and graphs of whole layers came for NVL72 systems with 26.06; model cards are of that time.
    rack = run.text("gpu").startswith("gb")
    is_hybrid = "Nemotron" in run.text("model")  # Mamba layers are not in CUDA graphs.
    is_new = rack and not is_hybrid and (release is None or release[1] >= "26.06")
    if "GPT-OSS" in run.text("model") and not is_new:
        # Experts with biases and a clamped gate had no fused kernel yet.
        software = replace(software, fused=False)
    return replace(
        software,
        **_PRECISION_AWARE,
        overlap_experts=is_new or "EP overlap on" in notes or "HybridEP + EP overlap" in notes,
        cuda_graphs=is_new or (not is_hybrid and "HybridEP" in notes),
        fast_dispatch=is_new or "HybridEP" in notes,
        # Recipes of its tables have the router and the preparation of dispatch in graphs (`cuda_graph_scope`, M).
        graphed_routing="performance-summary" in run.text("source"),
    )


def expert_ranks_of(run: Run, model: Model) -> int:
    """Return the number of ranks over which experts are spread.

    DeepEP sends rows to experts on other ranks, so a row with DeepEP and ep=1 must be wrong. We assume that experts are
    spread over as many replicas as divide them, as in all other rows of that table. This is an assumption: the
    program's own table was not read for that row (GPT-OSS 120B of Automodel).
    """
    ep, named = run.count("ep", 1), run.text("notes") + run.text("detail")
    num_experts = max(
        (each.num_experts for block, _ in model.kinds for each in block.operations if isinstance(each, Matmul)),
        default=0,
    )
    return gcd(run.count("dp"), num_experts) if ep == 1 and num_experts and "DeepEP" in named else ep


def model_of(run: Run) -> Model:
    """Return the model of a run, with adapters for LoRA; their rank is seldom published, and matters little."""
    model = _whole_model_of(run)
    return with_lora(model, _USUAL_RANK) if "LoRA" in run.text("source") + run.text("model") else model


def _whole_model_of(run: Run) -> Model:
    """Return the catalogue's model, if it has the name and the row states no other sizes, else a model by sizes."""
    called = run.text("model").split(" (")[0].removesuffix(" SFT").removesuffix(" LoRA")
    cut = re.fullmatch(r"(.*) cut to (\d+) layers", called)
    if cut is not None and (whole := find_name(cut[1])) is not None:
        return _cut(whole, int(cut[2]))
    known = find_name(called)
    if known is not None and (run.text("arch") == "moe" or not run.text("hidden")):
        model = get_model(known)
        predicts = known == "deepseek-v3" and "w/o MTP" not in run.text("model")
        return _predicting(known) if predicts else model
    if run.text("arch") == "moe":
        # A row's sizes are those of dense layers; no column states the number of experts.
        raise SkippedError(f"{run.text('model')} is a mixture of experts, and the catalogue has no such model")
    if not run.text("hidden") or not run.text("layers"):
        raise SkippedError(f"the sizes of {run.text('model')} are not published and the catalogue has no such model")
    return _described(
        layers=run.count("layers"),
        hidden=run.count("hidden"),
        heads=run.count("heads"),
        kv_heads=run.count("kv_heads", run.count("heads")),
        ffn=run.count("ffn_hidden", 0),
        vocabulary=run.count("vocab", _USUAL_VOCABULARY),
        sequence=run.count("sequence"),
        is_bloom="bigscience" in run.text("source").lower(),
        is_llama="llama" in called.lower() or "mlp_ratio 8/3" in run.text("notes"),
        dropout=any(word in run.text("source") for word in _WITH_DROPOUT),
    )


@lru_cache(maxsize=16)
def _cut(name: str, layers: int) -> Model:
    """Return a model of the catalogue with fewer layers."""
    return read_config({**CATALOGUE[name], "num_hidden_layers": layers}, name=f"{name} cut to {layers} layers")


@lru_cache(maxsize=8)
def _predicting(name: str) -> Model:
    return with_prediction(get_model(name))


@lru_cache(maxsize=256)
def _described(
    *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, sequence: int, is_bloom: bool,
    is_llama: bool, dropout: bool,
) -> Model:  # fmt: skip
    is_gpt = kv_heads == heads and ffn in (0, 4 * hidden) and not is_llama
    sizes = Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn or None,
        vocabulary=vocabulary,
        positions=sequence,
        dropout=dropout and is_gpt and not is_bloom,
    )
    return describe("bloom" if is_bloom and is_gpt else "gpt" if is_gpt else "llama", sizes)
