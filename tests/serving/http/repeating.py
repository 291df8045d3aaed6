"""A small engine with a rule anybody can follow, a limited number of slots and blocks, and nothing learnt.

What follows the last `say:` of a prompt, up to the end of that line, is said again, and then the text ends. Without
one, letters follow that depend on the prompt, without end; above a temperature of 0 they are drawn, by the seed and the
position.
"""

import random
import time
from collections import deque
from dataclasses import dataclass, field
from threading import Event, Thread, current_thread
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.request import Load, Logprob, Request, Token

END = 257
_BLOCK = 16
_MARK = b"say:"


@dataclass
class _Running:
    request: Request
    said: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.request.prompt) + len(self.said)) // _BLOCK)


class RepeatingEngine:
    """One step gives every running request a token."""

    def __init__(
        self, *, slots: int = 8, num_blocks: int = 4096, step_seconds: float = 0.0, max_length: int = 2048
    ) -> None:
        self.max_length, self.vocabulary_size = max_length, 258
        self._slots, self._num_blocks, self._step_seconds = slots, num_blocks, step_seconds
        self._waiting, self._running = deque[Request](), dict[str, _Running]()
        self._prompt_tokens = self._generation_tokens = self.num_steps = 0
        self.order = list[str]()
        #: What every step and every try to come back raises, while it is set.
        self.broken: str | None = None
        #: Steps wait until it is set: so long, requests are queued.
        self.gate = Event()
        self.gate.set()
        self.is_closed = False
        self._caller: Thread | None = None

    def add(self, request: Request) -> None:
        if 255 in request.prompt:
            raise ShardwiseError("the token 255 cannot be answered", remedy="other tokens")
        self._waiting.append(request)

    def cancel(self, request: str) -> None:
        self._running.pop(request, None)
        self._waiting = deque(each for each in self._waiting if each.id != request)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Token]:
        self._caller = self._caller or current_thread()
        assert current_thread() is self._caller, "one thread calls the engine"
        if self.broken is not None:
            raise RuntimeError(self.broken)
        self.gate.wait(60)
        self._waiting = deque(sorted(self._waiting, key=lambda request: request.priority))
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            self.order.append(request.id)
            self._running[request.id] = _Running(request)
            self._prompt_tokens += len(request.prompt)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self.num_steps += 1
        return [self._next(each) for each in list(self._running.values())]

    def _next(self, running: _Running) -> Token:
        request, place = running.request, len(running.said)
        sampling = request.sampling
        token = _rule(request, place)
        if token == END and (place < sampling.min_tokens or sampling.ignore_eos):
            token = ord(".")
        if sampling.logit_bias:
            token = max(sampling.logit_bias, key=lambda each: sampling.logit_bias[each])
        if sampling.guide is not None:
            row = sampling.guide.allowed()
            # What closes comes first, or a text of its letters would not end.
            wanted = (*b'"}]:,0a{[', token, *range(self.vocabulary_size))
            token = next(each for each in wanted if row[each])
            sampling.guide.advance(token)
        running.said.append(token)
        self._generation_tokens += 1
        is_end = (token == END and not sampling.ignore_eos) or token in sampling.stop_token_ids
        is_complete = sampling.guide is not None and sampling.guide.is_complete
        is_long = place + 1 >= sampling.max_tokens
        finish = "stop" if is_end else "complete" if is_complete else "length" if is_long else None
        if finish is not None:
            self._running.pop(request.id)
        first = None
        if place == 0 and sampling.prompt_logprobs is not None:
            first = tuple(_logprob(each, sampling.prompt_logprobs) for each in request.prompt[1:])
        return Token(
            request=request.id, token=token, finish=finish,  # type: ignore[arg-type]
            logprob=None if sampling.logprobs is None else _logprob(token, sampling.logprobs), prompt_logprobs=first,
        )  # fmt: skip

    def load(self) -> Load:
        return Load(
            num_running=len(self._running), num_waiting=len(self._waiting), num_blocks=self._num_blocks,
            num_used_blocks=sum(each.num_blocks for each in self._running.values()), num_preemptions=0,
            prompt_tokens=self._prompt_tokens, generation_tokens=self._generation_tokens, prefix_cache_queries=0,
            prefix_cache_hits=0,
        )  # fmt: skip

    def check(self) -> None: ...

    def recover(self) -> None:
        if self.broken is not None:
            raise RuntimeError(self.broken)
        self._waiting.clear()
        self._running.clear()

    def close(self) -> None:
        self.is_closed = True


class Elsewhere(RepeatingEngine):
    """For a process of its own: with what is told of an engine. A `!` breaks it once; a `?` cannot be answered."""

    eos_token_ids, tokenizer_source, summary = frozenset({257}), "bytes", None

    def add(self, request: Request) -> None:
        if ord("?") in request.prompt:
            raise ShardwiseError(f"questions are not answered{request.salt}", remedy="say something")
        if ord("!") in request.prompt:
            self.broken = "an exclamation"
        super().add(request)

    def recover(self) -> None:
        self.broken = None
        super().recover()


def load_none() -> Any:
    raise ShardwiseError("there is no such model", remedy="another one")


def _rule(request: Request, place: int) -> int:
    raw = bytes(token for token in request.prompt if token < 256)
    if _MARK in raw:
        said = raw.rpartition(_MARK)[2].partition(b"\n")[0].strip()
        return said[place] if place < len(said) else END
    if request.sampling.temperature > 0:
        seed = request.sampling.seed
        draw = random.Random(f"{seed}-{place}") if seed is not None else random.Random()
        return draw.choice(range(97, 123))
    return 97 + (sum(request.prompt) + place) % 26


def _logprob(token: int, num_top: int) -> Logprob:
    others = [(other, -2.0 - rank) for rank, other in enumerate(range(97, 123)) if other != token]
    return Logprob(token=token, logprob=-0.5, top=((token, -0.5), *others)[:num_top])
