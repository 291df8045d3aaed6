"""Serving on processors: a model of 124 million parameters (gpt2, drawn weights) beside transformers, in one run.

    python benchmarks/serving_cpu.py speed       one process, tp=2, pp=2, and transformers' generate on the same batch
    python benchmarks/serving_cpu.py overload    tokens a second at one and at four times what it can answer, over HTTP

`speed` is 8 sequences of 32 + 32 tokens, fp32, greedy; tokens are held to be equal. One process has two threads, each
of two ranks one. `overload` serves a small model: tokens a second that were made while clients ask without a pause, as
many as there are places, twice as many, and four times as many with a short queue, where the rest are refused and try
again when they are told to. The best of the first two is what the last is held against.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from record import kept, record

from shardwise.serving.client.server_process import server_for
from shardwise.serving.load import load_engine
from shardwise.serving.request import Request, Sampling

COUNT, NUM_PROMPT, NUM_TOKENS = 8, 32, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "overload"])
    given = parser.parse_args()
    results = kept("serving_cpu")
    results[given.part] = speed() if given.part == "speed" else asyncio.run(overload())
    print(results[given.part])
    record("serving_cpu", results)
    return 0


def speed() -> dict[str, Any]:
    import transformers as hf

    torch.set_num_threads(2)
    prompts = torch.randint(0, 50_000, (COUNT, NUM_PROMPT), generator=torch.Generator().manual_seed(0))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        theirs = hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=0, eos_token_id=None)).eval()
        theirs.save_pretrained(folder)
        with torch.inference_mode():
            found = []
            for _ in range(2):
                begun = perf_counter()
                made = theirs.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_TOKENS, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
                found.append(COUNT * NUM_TOKENS / (perf_counter() - begun))
        results["transformers"] = round(max(found), 1)
        right = made[:, NUM_PROMPT:].tolist()
        print(results, flush=True)
        for plan in ("auto", "tp=2", "pp=2"):
            engine = load_engine(folder, plan=plan, kv_bytes=2**29)
            found = []
            for turn in range(2):
                begun = perf_counter()
                answers = answer(engine, prompts.tolist(), turn)
                found.append(COUNT * NUM_TOKENS / (perf_counter() - begun))
            name = "one process" if plan == "auto" else plan
            results[name] = round(max(found), 1)
            results[f"{name}, equal answers"] = sum(one == two for one, two in zip(answers, right, strict=True))
            print(name, results[name], flush=True)
            engine.close()
    return results


def answer(engine: Any, prompts: list[list[int]], turn: int) -> list[list[int]]:
    """Prompts of each turn have a salt of their own: none is found in the cache."""
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=tuple(prompt), sampling=sampling, salt=str(turn)))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for token in engine.step():
            found.setdefault(token.request, []).append(token.token)
    return [found[str(number)] for number in range(len(prompts))]


async def overload(seconds: float = 6.0, rounds: int = 5, places: int = 64) -> dict[str, Any]:
    """The engine has 64 places and a queue of as many. Clients ask again as soon as they are answered, or refused and
    told when: as many as places, as there is room for in all, and four times as many as places. In turns, so that
    whatever else the machine does meanwhile is shared."""
    import transformers as hf

    found: dict[int, list[dict[str, float]]] = {1: [], 2: [], 4: []}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = hf.LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=256, **sizes)
        hf.LlamaForCausalLM(config).save_pretrained(folder)
        with server_for(str(folder), ["--kv", "256MiB", "--queue", str(places)]) as address:
            host, _, port = address.url.removeprefix("http://").partition(":")
            for _ in range(rounds):
                for times, each in found.items():
                    each.append(await _asked(host, int(port), places * times, seconds))
                    print(times, each[-1], flush=True)
    results: dict[str, Any] = {"seconds": seconds, "rounds": rounds, "places": places, "queue": places}
    for times, each in found.items():
        results[f"{times} x"] = {name: round(sum(one[name] for one in each) / rounds, 3) for name in each[0]}
    best = max(results["1 x"]["tokens_per_second"], results["2 x"]["tokens_per_second"])
    results["share_at_4_x"] = round(results["4 x"]["tokens_per_second"] / best, 3)
    return results


async def _asked(host: str, port: int, num_clients: int, seconds: float) -> dict[str, float]:
    """Tokens that the engine made in the last three quarters, by its own count; and what asking has cost here."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(partial(_Client, number), host, port))[1] for number in range(num_clients)]
    await asyncio.sleep(seconds / 4)  # Until all are there.
    before, first = sum(each.refused for each in clients), await _count(host, port)
    used, servers = process_time(), _cpu()
    await asyncio.sleep(seconds * 3 / 4)
    after, last, used = sum(each.refused for each in clients), await _count(host, port), process_time() - used
    http, engine = (now - then for now, then in zip(_cpu(), servers, strict=True))
    for each in clients:
        each.is_over = True
    while not all(each.is_idle for each in clients):
        await asyncio.sleep(0.05)
    for each in clients:
        each.end()
    wall = last[0] - first[0]
    return {
        "tokens_per_second": (last[1] - first[1]) / wall,
        "refused_per_second": (after - before) / wall,
        "tokens_per_core_second_of_the_engine": (last[1] - first[1]) / engine,
        "cores_of_the_engine": engine / wall,
        "cores_of_http": http / wall,
        "cores_of_the_clients": used / wall,
    }


def _cpu() -> tuple[float, float]:
    """Seconds of a core that the server's two processes have used: the one that we have started, and the engine's."""
    (server,) = _children(os.getpid())
    return _used(server), max(map(_used, _children(server)), default=_used(server))


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(each) for task in tasks for each in task.read_text().split()]
    return [each for each in found if "resource_tracker" not in Path(f"/proc/{each}/cmdline").read_text()]


def _used(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _count(host: str, port: int) -> tuple[float, float]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    line = next(each for each in text.splitlines() if each.startswith("shardwise:generation_tokens_total{"))
    return perf_counter(), float(line.split()[-1])


class _Client(asyncio.Protocol):
    """One connection that asks the same again and again. Of an answer it reads the status, and where it ends: a client
    that parses would take the time that is to be measured."""

    def __init__(self, number: int) -> None:
        body = json.dumps({"prompt": [number % 512] * 16, "max_tokens": 16, "ignore_eos": True, "user": str(number)})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._asks = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        self._held, self.refused, self.is_over, self.is_idle = b"", 0, False, False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def end(self) -> None:
        self._transport.close()

    def _ask(self) -> None:
        self.is_idle = self.is_over
        if not self.is_over:
            self._transport.write(self._asks)

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, has_head, body = self._held.partition(b"\r\n\r\n")
        if not has_head or len(body) < int(_field(head, b"content-length")):
            return
        self._held, status = b"", head[9:12]
        if status == b"200":
            self._ask()
            return
        assert status == b"429", head
        self.refused += 1
        asyncio.get_running_loop().call_later(int(_field(head, b"retry-after")), self._ask)


def _field(head: bytes, name: bytes) -> bytes:
    return head.lower().partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


if __name__ == "__main__":
    sys.exit(main())
