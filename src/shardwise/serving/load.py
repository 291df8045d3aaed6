"""Load a model into an engine: read it, put it on its device, and allocate as many KV blocks as fit."""

from pathlib import Path

import torch

from shardwise.cluster.file import find_cluster
from shardwise.errors import unknown
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import find_gpus
from shardwise.serving.assemble import assemble
from shardwise.serving.engine import LLMEngine
from shardwise.serving.forecast import GOALS, choose_plan
from shardwise.serving.identify import find_newest_run
from shardwise.serving.limits import Limits
from shardwise.serving.narrow_weights import check_kind
from shardwise.serving.replicas import Replicas
from shardwise.serving.sources import PRECISIONS, describe_source, find_shape, read_source
from shardwise.serving.warm_up import begin_warm_up
from shardwise.training.machine import cluster_here


def load_engine(
    source: str | Path | None = None,
    *,
    plan: str | None = None,
    random_weights: bool = False,
    precision: str | None = None,
    weights: str | None = None,
    kv_bytes: int | None = None,
    max_length: int | None = None,
    block_size: int = 16,
    token_budget: int | None = None,
    max_running: int | None = None,
    host_bytes: int = 0,
    file_bytes: int = 0,
    kv_folder: Path | None = None,
    device: str | None = None,
    goal: str = "tokens",
    cluster: str | None = None,
    seed: int | None = None,
) -> LLMEngine | Replicas:
    """Load the engine of a model: a Hugging Face folder, a run of `shardwise train` (by default the newest), a GGUF
    file, or a name of the catalogue with `random_weights`.

    `kv_bytes` is the size of the cache; by default the free memory of a GPU, or a quarter of a host's, at most 4 GiB.
    Without a plan all GPUs are used, as the planner finds best for a `goal`, "tokens" or "latency"; without GPUs one
    process computes. `weights` quantises the layers' weights to "fp8" or "int4". `cluster` is a file of `shardwise
    probe` or a name: ranks are placed on its devices so that their communication takes least time.
    """
    if goal not in GOALS:
        raise unknown("goal", goal, GOALS)
    if precision is not None and precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    check_kind(weights)
    on = None if cluster is None else find_cluster(cluster)
    limits = Limits(
        weights=weights,
        kv_bytes=kv_bytes,
        max_length=max_length,
        block_size=block_size,
        token_budget=token_budget,
        max_running=max_running,
        host_bytes=host_bytes,
        file_bytes=file_bytes,
        kv_folder=kv_folder,
    )
    named = str(find_newest_run() if source is None else source)
    dtype = None if precision is None else PRECISIONS[precision]
    chosen: str | Plan | None = None if plan in (None, "", "auto") else plan
    held = limits.hold_folder()
    try:
        num_gpus = len(find_gpus().gpus) if device is None else 1
        if chosen is None and (num_gpus if on is None else on.num_devices) > 1:
            settings, _, _ = describe_source(named, random_weights=random_weights, dtype=dtype)
            chosen = choose_plan(settings, on or cluster_here(num_gpus), goal, max_length)
        engine: LLMEngine | Replicas
        if chosen is not None:
            from shardwise.serving.sharded import load_sharded  # Loads what ranks need, as much as torch.

            engine = load_sharded(
                named, chosen, limits, random_weights=random_weights, dtype=dtype, seed=seed, cluster=cluster
            )
        else:
            place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            engine = _load_here(named, place, limits, random_weights=random_weights, dtype=dtype, seed=seed)
    except BaseException:
        held.release()
        raise
    engine.folder = held
    return engine


def _load_here(
    source: str, device: torch.device, limits: Limits, *, random_weights: bool, dtype: torch.dtype | None,
    seed: int | None,
) -> LLMEngine:  # fmt: skip
    """Load on one device. A GPU's kernels compile meanwhile, as soon as the model's shape is known."""
    is_gpu, warm_up = device.type == "cuda", None
    shape = find_shape(source, random_weights=random_weights, dtype=dtype, device=device) if is_gpu else None
    if shape is not None:
        warm_up = begin_warm_up(*shape, limits, device)
    model, identity = read_source(source, random_weights=random_weights, dtype=dtype, device=device)
    if is_gpu and warm_up is None:
        warm_up = begin_warm_up(model.settings, model.embed.weight.dtype, limits, device)
    limits.clear_folder()
    engine = assemble(model, limits, identity, seed=seed)
    if warm_up is not None:
        warm_up.result()
    return engine
