"""A model to an engine that answers: read, put on its device, and given as many KV blocks as there is room for."""

from pathlib import Path

import torch

from shardwise.errors import ShardwiseError, unknown
from shardwise.serving.assemble import Limits, assemble
from shardwise.serving.engine import LLMEngine
from shardwise.serving.sources import PRECISIONS, find_newest_run, read_source


def load_engine(
    source: str | Path | None = None,
    *,
    plan: str | None = None,
    random_weights: bool = False,
    precision: str | None = None,
    kv_bytes: int | None = None,
    max_length: int | None = None,
    block_size: int = 16,
    token_budget: int | None = None,
    max_running: int | None = None,
    device: str | None = None,
    seed: int | None = None,
) -> LLMEngine:
    """The engine of a model: a Hugging Face folder, a run of `shardwise train` (the newest, if none is named), a GGUF
    file, or a catalogue's name with `random_weights`.

    `kv_bytes` is for the cache; by default what is free on a GPU, and on a host a quarter of it, 4 GiB at most.
    """
    if plan not in (None, "", "auto"):
        raise ShardwiseError(f"this engine answers on one device, not by the plan {plan}", remedy="no --plan")
    if precision is not None and precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, identity = read_source(
        str(find_newest_run() if source is None else source),
        random_weights=random_weights,
        dtype=None if precision is None else PRECISIONS[precision],
        device=place,
    )
    limits = Limits(
        kv_bytes=kv_bytes,
        max_length=max_length,
        block_size=block_size,
        token_budget=token_budget,
        max_running=max_running,
    )
    return assemble(model, limits, identity, seed=seed)
