"""What clients of the engine send, and what it returns token by token. No tensors, no text.

The HTTP side makes a `Request` (tokens, not text) from what a client sent, and turns each `Token` back into text. The
engine knows nothing of HTTP or text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardwise.errors import ShardwiseError
from shardwise.units import counted

#: Why a sequence ended: a stop token, the token limit, a guide that allows nothing more (its last token is part of the
#: text), a client that left, or a failure of the engine.
Finish = Literal["stop", "length", "complete", "cancelled", "failed"]


class Guide(Protocol):
    """Restricts the next token of one sequence, such as a grammar."""

    def allowed(self) -> Any:
        """Return a row of booleans over the vocabulary: the tokens that may come next."""

    def advance(self, token: int) -> None:
        """Advance by the token that was sampled."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the tokens so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is sampled. A temperature of 0 takes the most likely token; a tie goes to the lower number.

    `top_k=0` and `top_p=1` exclude nothing. A `seed` gives the same tokens whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    #: How many of the most likely tokens to return with log-probabilities. None: not even the sampled token's own.
    logprobs: int | None = None
    #: The same for every token of the prompt but the first (`echo`, perplexity).
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to be continued. Lower `priority` comes first. Prefixes are shared among requests with one `salt`."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    salt: str = ""
    #: When it was received, by `time.monotonic`, if it waited before the engine.
    asked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token's log-probability before temperature and cuts, and those of the most likely tokens, highest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step's result for a request. With `finish` it is the last; if cancelled or failed, it has no token."""

    request: str
    token: int | None
    logprob: Logprob | None = None
    finish: Finish | None = None
    #: With the first token: how many tokens of the prompt were cached, and the prompt's log-probabilities.
    num_cached: int = 0
    prompt_logprobs: tuple[Logprob, ...] | None = None
    #: With the finish "failed": the reason.
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The engine's load and memory, for metrics and the page."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    #: Traffic of the tiers below the cache, where there are any.
    kv_offload_load_bytes: int = 0
    kv_offload_store_bytes: int = 0
    kv_offload_load_seconds: float = 0.0
    kv_offload_store_seconds: float = 0.0
    #: How full the host's tier is, from 0 to 1.
    kv_offload_host_usage: float = 0.0
    #: Which part of the engine is down, and why, while the rest answers.
    trouble: str | None = None
    #: How many requests may run at once; 0 if unknown.
    max_running: int = 0


def describe(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, ShardwiseError):
        return error.problem.splitlines()[0]
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def check(request: Request, max_length: int, vocabulary_size: int) -> None:
    """Refuse a request that can never be answered."""
    num_prompt, most = len(request.prompt), request.sampling.max_tokens
    if not num_prompt:
        raise ShardwiseError("a prompt needs at least one token", remedy="a prompt with text")
    if most < 1:
        raise ShardwiseError(f"max_tokens={most} asks for no token", remedy="max_tokens=1 or more")
    if num_prompt + most > max_length:
        room = max_length - num_prompt
        raise ShardwiseError(
            f"{counted(num_prompt, 'token')} of prompt and {most:,} to come are {num_prompt + most:,}, and this model"
            f" takes {max_length:,}",
            remedy=f"max_tokens={room}" if room > 0 else f"a prompt of at most {max_length - 1:,} tokens",
        )
    wrong = [token for token in request.prompt if not 0 <= token < vocabulary_size]
    wrong += [token for token in request.sampling.logit_bias if not 0 <= token < vocabulary_size]
    if wrong:
        raise ShardwiseError(
            f"token {wrong[0]} is outside the vocabulary of {vocabulary_size:,}",
            remedy=f"tokens from 0 to {vocabulary_size - 1}",
        )


class Answering(Protocol):
    """The part of an engine that the HTTP side uses. One thread calls all methods."""

    #: The most tokens of prompt and answer together.
    max_length: int
    vocabulary_size: int

    def add(self, request: Request) -> None:
        """Accept a request. Raises a `ShardwiseError` if it can never be answered (too long, tokens out of range)."""

    def cancel(self, request: str) -> None:
        """Drop a request: its blocks are free before the next step. Unknown names are ignored."""

    def has_work(self) -> bool: ...

    def step(self) -> list[Token]:
        """Schedule, run, collect: the next tokens of some requests."""

    def load(self) -> Load: ...

    def check(self) -> None:
        """Raise if something that it depends on is gone, such as a rank. Called while there is nothing to do."""

    def recover(self) -> None:
        """After a failure: drop all requests and become ready for others. Raises if that is not possible (yet)."""

    def close(self) -> None: ...
