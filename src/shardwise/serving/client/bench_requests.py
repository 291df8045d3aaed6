"""The requests of a benchmark, by name: always the same for the same seed."""

import random
from dataclasses import dataclass

from shardwise.errors import ShardwiseError, unknown

#: By name: the number of requests, and the ranges of prompt and answer tokens, drawn uniformly.
SHAPES = {
    "256-requests": (256, (100, 1024), (100, 1024)),
    "32-sequences": (32, (128, 128), (256, 256)),
    "one-sequence": (1, (128, 128), (256, 256)),
    "tiny": (8, (8, 16), (8, 16)),  # For models of 32 tokens, as the recipe `tiny` trains.
}
_LARGEST_TOKEN = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A prompt as tokens, and how many tokens to generate, whatever they are."""

    prompt: tuple[int, ...]
    max_tokens: int


def make_requests(name: str, *, vocabulary: int | None = None, count: int | None = None) -> list[BenchRequest]:
    """Return the requests of this name. Tokens are below the vocabulary's size, if that is known.

    `256-requests` are those that nano-vllm and others are benchmarked with: seed 0, all prompts drawn before all
    lengths.
    """
    if name not in SHAPES:
        raise unknown("workload", name, SHAPES)
    if count is not None and count < 1:
        raise ShardwiseError(f"--requests {count}: it must be at least 1", remedy="--requests 16")
    if vocabulary is not None and vocabulary < 1:
        raise ShardwiseError(f"--vocabulary {vocabulary}: it must be at least 1", remedy="leave --vocabulary out")
    number, (shortest, longest), (fewest, most) = SHAPES[name]
    draw = random.Random(0)
    prompts = [[draw.randint(0, _LARGEST_TOKEN) for _ in range(draw.randint(shortest, longest))] for _ in range(number)]
    lengths = [draw.randint(fewest, most) for _ in range(number)]
    limit = _LARGEST_TOKEN + 1 if vocabulary is None else vocabulary
    made = [
        BenchRequest(prompt=tuple(token % limit for token in prompt), max_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return made[:count]
