"""A model served as a user serves it, asked over HTTP: the same answer twice, a stream, and KV blocks that move out.

    python -m tests.gpu.served runs/first --kv 1MiB --kv-host 64MiB       what follows is what `shardwise serve` is told

The KV budget is to be so small that other requests drive the first one's blocks out. The answer is JSON.
"""

import asyncio
import json
import sys
from typing import Any

from shardwise.serving.client.http_client import Address
from shardwise.serving.client.server_process import server_for


async def ask(address: Address, num_tokens: int = 24) -> dict[str, Any]:
    model = (await address.get("/v1/models"))["data"][0]
    longest: int = model["max_model_len"] - num_tokens

    def body(prompt: str) -> dict[str, Any]:
        return {
            "model": model["id"], "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip

    def prompt(number: int) -> str:
        """As long as there is room for, and from its beginning on another one than the others."""
        return (f"{number} is a prompt. " * longest)[: longest * 3 // 4]

    async def tokens(text: str) -> list[int]:
        found: list[int] = (await address.post("/v1/completions", body(text)))["choices"][0]["token_ids"]
        return found

    first = await tokens(prompt(0))
    others = await asyncio.gather(*(tokens(prompt(number)) for number in range(1, 9)))
    again = await tokens(prompt(0))
    streamed = [event async for event in address.events("/v1/completions", {**body(prompt(0)), "stream": True})]
    live, health = await address.get("/live"), await address.get("/health")
    is_right = {
        "health": health["status"] == "ok",
        "as many tokens": {len(each) for each in (first, *others)} == {num_tokens},
        "streamed": len(streamed) > 1,
        "blocks moved out": live["kv_offload_store_bytes"] > 0,
        "all blocks are free": live["num_used_blocks"] == 0,
    }
    same = sum(one == other for one, other in zip(first, again, strict=True))
    figures = {key: live[key] for key in ("num_blocks", "kv_offload_store_bytes", "kv_offload_load_bytes")}
    return {"served": all(is_right.values()), "checks": is_right, "same_tokens": same, **figures}


def main(words: list[str]) -> int:
    with server_for(words[0], words[1:]) as address:
        answer = asyncio.run(ask(address))
    print(json.dumps(answer, indent=1))
    return 0 if answer["served"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
