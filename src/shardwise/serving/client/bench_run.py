"""Send requests to a server, at a rate or as fast as possible, and record when each token arrives."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.client.bench_requests import BenchRequest
from shardwise.serving.client.http_client import Address, HttpStatusError


@dataclass(slots=True, kw_only=True)
class Timed:
    """One request: when it was sent and when each token arrived, in seconds of the run; or the error returned."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    refused: str | None = None
    is_too_long: bool = False

    @property
    def first(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def between(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All requests at one rate (None: all at once)."""

    rate: float | None
    requests: tuple[Timed, ...]
    input_tokens: int

    @property
    def answered(self) -> list[Timed]:
        return [each for each in self.requests if each.tokens]

    @property
    def seconds(self) -> float:
        return max((each.tokens[-1] for each in self.answered), default=0.0)

    def figures(self) -> dict[str, Any]:
        """Return the figures for machines: seconds by quantile, and tokens per second."""
        firsts = [each.first for each in self.answered]
        between = [gap for each in self.answered for gap in each.between]
        output = sum(len(each.tokens) for each in self.answered)
        seconds = self.seconds or 1.0
        return {
            "rate": self.rate,
            "num_requests": len(self.requests),
            "num_refused": sum(each.refused is not None for each in self.requests),
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": output,
            "output_tokens_per_second": output / seconds,
            "requests_per_second": len(self.answered) / seconds,
            "first_token_seconds": quantiles(firsts),
            "between_tokens_seconds": quantiles(between),
        }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean, and the 50th, 90th and 99th percentiles."""
    if not values:
        return None
    ranked = sorted(values)
    found = {f"p{part}": ranked[ceil(part / 100 * len(ranked)) - 1] for part in (50, 90, 99)}
    return {"mean": sum(ranked) / len(ranked), **found}


async def measure(address: Address, requests: Sequence[BenchRequest], rate: float | None) -> Measured:
    """Send all requests. At a rate they arrive at random times (Poisson), as from independent clients."""
    draw, begun = random.Random(1), time.perf_counter()
    timed, tasks, due = list[Timed](), list[asyncio.Task[None]](), 0.0
    for request in requests:
        if rate is not None:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - begun)))
            due += draw.expovariate(rate)
        each = Timed(sent=time.perf_counter() - begun)
        timed.append(each)
        tasks.append(asyncio.ensure_future(_send(address, request, each, begun)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    refused = [each.refused for each in timed if each.refused is not None]
    if len(refused) == len(timed):
        longest = max(len(each.prompt) + each.max_tokens for each in requests)
        raise ShardwiseError(
            f"the server has refused all {len(timed)} requests: {refused[0]}",
            remedy=f"--workload tiny, or a model of longer texts: a prompt and its answer have up to {longest:,} tokens"
            if any(each.is_too_long for each in timed)
            else "--requests 1",
        )
    return Measured(rate=rate, requests=tuple(timed), input_tokens=sum(len(each.prompt) for each in requests))


async def _send(address: Address, request: BenchRequest, timed: Timed, begun: float) -> None:
    body = {
        "prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0.6, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    try:
        async for event in address.events("/v1/completions", body):
            now = time.perf_counter() - begun
            for choice in event["choices"]:
                timed.tokens += [now] * len(choice.get("token_ids", ()))
    except HttpStatusError as error:
        timed.refused = str(error)
        timed.is_too_long = error.code == "context_length_exceeded"
        timed.tokens.clear()
