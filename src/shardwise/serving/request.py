"""What is asked of the engine, and what comes back of it, one token after the other. No tensors, no text.

The HTTP side makes a `Request` from what a client sent (its text is tokens by then), and turns each `Token` back into
text. The engine knows neither of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shardwise.errors import ShardwiseError
from shardwise.units import counted

#: Why a sequence ended: a token that ends it, as many tokens as it may have, a guide that allows nothing more (its last
#: token is part of the text), whoever asked is gone, or who computed it.
Finish = Literal["stop", "length", "complete", "cancelled", "failed"]


class Guide(Protocol):
    """What narrows the next token of one sequence, such as a grammar."""

    def allowed(self) -> Any:
        """A row of booleans over the vocabulary: tokens that may come next."""

    def advance(self, token: int) -> None:
        """This token came."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what came so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. A temperature of 0 takes the likeliest, and a tie goes to the lower number.

    `top_k=0` and `top_p=1` leave nothing out. A `seed` gives the same tokens whatever else is computed with them.
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
    #: How many of the likeliest tokens are told with their log-probabilities; none: not even the token's own.
    logprobs: int | None = None
    #: The same for every token of the prompt but the first (`echo`, perplexity).
    prompt_logprobs: int | None = None
    guide: Guide | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to be continued. Lower `priority` comes first. Beginnings are shared among requests of one `salt`."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    salt: str = ""
    #: When it was asked for, by `time.monotonic`, where it waited before the engine.
    asked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token's log-probability before temperature and cuts, and those of the likeliest, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One step's news of a request. With `finish` it is the last; a cancelled or failed request's has no token."""

    request: str
    token: int | None
    logprob: Logprob | None = None
    finish: Finish | None = None
    #: With the first token: how much of the prompt was found in the cache, and the prompt's log-probabilities.
    num_cached: int = 0
    prompt_logprobs: tuple[Logprob, ...] | None = None
    #: With the finish "failed": why.
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine has to do and holds, for metrics and the page."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    #: Of the tiers beneath the cache, where there are any.
    kv_offload_load_bytes: int = 0
    kv_offload_store_bytes: int = 0
    kv_offload_load_seconds: float = 0.0
    kv_offload_store_seconds: float = 0.0
    #: How full the host's tier is, from 0 to 1.
    kv_offload_host_usage: float = 0.0
    #: What part of the engine is away, and why, while the rest answers.
    trouble: str | None = None
    #: How many may run at once; 0 where that is not known.
    max_running: int = 0


def describe(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, ShardwiseError):
        return error.problem.splitlines()[0]
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def check(request: Request, max_length: int, vocabulary_size: int) -> None:
    """Refuse what can never be answered."""
    num_prompt, most = len(request.prompt), request.sampling.max_tokens
    if not num_prompt:
        raise ShardwiseError("a prompt without tokens has nothing to be continued", remedy="at least one token")
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
    """What the HTTP side needs of an engine. One thread calls all of it but nothing twice at once."""

    #: Prompt and answer together are at most so long.
    max_length: int
    vocabulary_size: int

    def add(self, request: Request) -> None:
        """Take a request. Raises a `ShardwiseError` if it can never be answered (too long, tokens out of range)."""

    def cancel(self, request: str) -> None:
        """Let go of it: its blocks are free before the next step. Unknown names are ignored."""

    def has_work(self) -> bool: ...

    def step(self) -> list[Token]:
        """Schedule, run, collect: the next tokens of some requests."""

    def load(self) -> Load: ...

    def check(self) -> None:
        """Raise if what it stands on is gone, such as a rank. Asked while there is nothing to do."""

    def recover(self) -> None:
        """After a failure: forget all requests, and be ready for others. Raises where that cannot be (yet)."""

    def close(self) -> None: ...
