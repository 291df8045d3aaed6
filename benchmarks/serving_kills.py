"""kill -9 of a rank while it serves: how soon its requests are told, and how soon the next one is answered.

    python benchmarks/serving_kills.py           tp=2 and pp=2, a model of 124 million parameters (gpt2, drawn weights)

`shardwise serve` is started as users start it. In each round four requests are under way, two of them streamed, when
one of the two ranks is killed, in turns. All times are seconds from the kill:

    told            until the last of the four has its error: 503, or an error as the last event of a stream
    health_fails    until /health is 503
    health_well     until /health is 200 again
    answered        until the first new request is answered (it is sent again and again, and gets 503 until then)
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from record import record

from shardwise.serving.client.http_client import Address, HttpStatusError
from shardwise.serving.client.server_process import server_for

PLANS, ROUNDS = ("tp=2", "pp=2"), 6
#: A request goes on for longer than a round lasts, unless it is told that it cannot.
LONG = {"prompt": [7] * 32, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": [7] * 32, "max_tokens": 1, "temperature": 0}
PAUSE = 0.02


def main() -> int:
    import transformers as hf

    results: dict[str, Any] = {"rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=0, eos_token_id=None)).save_pretrained(folder)
        for plan in PLANS:
            with server_for(folder, ["--plan", plan, "--kv", "256MiB"]) as address:
                rounds = [asyncio.run(kill_one(address, turn)) for turn in range(ROUNDS)]
            results[plan] = {
                name: {"median": round(statistics.median(times), 2), "longest": round(max(times), 2)}
                for name in rounds[0]
                if (times := [each[name] for each in rounds])
            }
            print(plan, results[plan], flush=True)
    record("serving_kills", results)
    return 0


async def kill_one(address: Address, turn: int) -> dict[str, float]:
    """Kill the first or the second rank amid four requests, and follow what clients see."""
    right = (await address.post("/v1/completions", SHORT))["choices"][0]["text"]
    begun = [asyncio.Event() for _ in range(2)]
    asked = [asyncio.ensure_future(stream(address, each)) for each in begun]
    asked += [asyncio.ensure_future(whole(address)) for _ in range(2)]
    for each in begun:
        await each.wait()
    ranks = leaves(os.getpid())
    assert len(ranks) == 2, f"two ranks were expected: {ranks}"
    os.kill(ranks[turn % 2], signal.SIGKILL)
    killed = perf_counter()
    seen = {
        "told": told(asked), "health_fails": until(lambda: is_well(address), False),
        "health_well": well_again(address), "answered": answered(address, right),
    }  # fmt: skip
    times = await asyncio.gather(*seen.values())
    return {name: at - killed for name, at in zip(seen, times, strict=True)}


async def stream(address: Address, begun: asyncio.Event) -> None:
    async for _ in address.events("/v1/completions", LONG | {"stream": True}):
        begun.set()


async def whole(address: Address) -> None:
    await address.post("/v1/completions", LONG)


async def told(asked: list["asyncio.Task[None]"]) -> float:
    """When the last of the requests has failed; each has to."""
    for place, result in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
        assert isinstance(result, HttpStatusError), f"a request did not fail: {result!r}"
        assert place < 2 or result.status == 503, result
        assert "killed by SIGKILL" in result.message, result
    return perf_counter()


async def well_again(address: Address) -> float:
    await until(lambda: is_well(address), False)
    return await until(lambda: is_well(address), True)


async def answered(address: Address, right: str) -> float:
    """When a request is answered that was refused before: the same text as ever."""
    await until(lambda: is_answered(address, right), False)
    return await until(lambda: is_answered(address, right), True)


async def until(holds: Callable[[], Awaitable[bool]], wanted: bool) -> float:
    while await holds() != wanted:
        await asyncio.sleep(PAUSE)
    return perf_counter()


async def is_well(address: Address) -> bool:
    try:
        return bool((await address.get("/health"))["status"] == "ok")
    except HttpStatusError as error:
        if error.status != 503:
            raise
        return False


async def is_answered(address: Address, right: str) -> bool:
    try:
        found = await address.post("/v1/completions", SHORT)
    except HttpStatusError as error:
        if error.status != 503:
            raise
        return False
    assert found["choices"][0]["text"] == right
    return True


def leaves(process: int) -> list[int]:
    """The ranks among the processes that one has started: they start none themselves."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    started = [int(each) for task in tasks for each in task.read_text().split()]
    found = [leaf for each in started for leaf in leaves(each) or [each]]
    return sorted(each for each in found if "resource_tracker" not in Path(f"/proc/{each}/cmdline").read_text())


if __name__ == "__main__":
    sys.exit(main())
