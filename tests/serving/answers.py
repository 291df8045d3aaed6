"""Engines over small models, and all that comes out of them."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from shardwise.nets.hf import load_model
from shardwise.nets.transformer import Transformer
from shardwise.serving.assemble import Identity, assemble
from shardwise.serving.engine import LLMEngine
from shardwise.serving.kv_cache import block_bytes
from shardwise.serving.limits import Limits
from shardwise.serving.request import Answering, Request, Sampling, Token
from tests.nets.families import VOCABULARY, save_theirs

#: One of each family of `nets`, and the turns that matter to a cache.
FAMILIES = (
    "llama", "qwen2, windows", "qwen3", "qwen3-moe", "mistral", "mixtral", "deepseek-v2", "deepseek-v3", "gpt2",
)  # fmt: skip


@cache
def both(family: str) -> tuple[nn.Module, Transformer]:
    """A model of transformers and ours with its weights."""
    with TemporaryDirectory() as folder:
        return save_theirs(family, Path(folder)), load_model(folder)


def engine_over(model: Transformer, *, num_blocks: int = 64, block_size: int = 4, **limits: Any) -> LLMEngine:
    size = block_bytes(model.settings, model.settings.num_layers, torch.float32, block_size)
    given = Limits(kv_bytes=num_blocks * size, block_size=block_size, **limits)
    return assemble(model, given, Identity(fingerprint="small"), seed=0)


def prompts(count: int, *, shortest: int = 3, longest: int = 20, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]


def ask(prompt: Iterable[int], name: str = "r", num_tokens: int = 12, priority: int = 0, **options: Any) -> Request:
    sampling = Sampling(max_tokens=num_tokens, **{"temperature": 0.0, **options})
    return Request(id=name, prompt=tuple(prompt), sampling=sampling, priority=priority)


def run(engine: Answering, requests: Iterable[Request] = (), most_steps: int = 5000) -> dict[str, list[Token]]:
    """Everything that is told of the requests until there is nothing left to do."""
    told: dict[str, list[Token]] = {}
    for request in requests:
        engine.add(request)
    for _ in range(most_steps):
        if not engine.has_work():
            return told
        for token in engine.step():
            told.setdefault(token.request, []).append(token)
    raise AssertionError(f"not done after {most_steps} steps")


def tokens_of(told: dict[str, list[Token]]) -> dict[str, list[int]]:
    return {name: [each.token for each in tokens if each.token is not None] for name, tokens in told.items()}


def answer(engine: Answering, requests: Iterable[Request]) -> list[list[int]]:
    """The tokens of each request, in the order of the requests."""
    requests = list(requests)
    told = tokens_of(run(engine, requests))
    return [told[each.id] for each in requests]


def expected(theirs: nn.Module, prompt: Iterable[int], num_tokens: int = 12) -> list[int]:
    """What transformers' greedy generation gives."""
    given = torch.tensor([list(prompt)])
    made = theirs.generate(given, max_new_tokens=num_tokens, do_sample=False)  # type: ignore[operator]
    found: list[int] = made[0, given.shape[1] :].tolist()
    return found
