"""Serving on processors: a model of 124 million parameters (gpt2, drawn weights) beside transformers, in one run.

    python benchmarks/serving_cpu.py speed       one process, tp=2, pp=2, and transformers' generate on the same batch
    python benchmarks/serving_cpu.py overload    tokens a second at one and at four times what it can answer, over HTTP

`speed` is 8 sequences of 32 + 32 tokens, fp32, greedy; tokens are held to be equal. One process has two threads, each
of two ranks one. `overload` serves a small model: tokens a second that were answered while clients ask without a
pause, as many as there are places, and four times as many with a short queue, where the rest are refused and try again.
"""

import argparse
import asyncio
import sys
import tempfile
from time import perf_counter
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


async def overload(seconds: float = 24.0, places: int = 64) -> dict[str, Any]:
    """The engine has 64 places. Clients ask again as soon as they are answered, or refused and told when."""
    import httpx
    import transformers as hf

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = hf.LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=256, **sizes)
        hf.LlamaForCausalLM(config).save_pretrained(folder)
        results: dict[str, Any] = {"seconds": seconds, "places": places, "queue": places}
        with server_for(str(folder), ["--kv", "256MiB", "--queue", str(places)]) as address:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=address.url, timeout=120, trust_env=False, limits=limits) as client:
                for times in (1, 4, 1, 4):
                    found = await _asked(client, places * times, seconds)
                    before = results.get(f"{times} x", {"tokens_per_second": 0.0})
                    results[f"{times} x"] = max(found, before, key=lambda each: each["tokens_per_second"])
                    print(times, found, flush=True)
        results["share_at_4_x"] = round(results["4 x"]["tokens_per_second"] / results["1 x"]["tokens_per_second"], 3)
    return results


async def _asked(client: Any, num_clients: int, seconds: float) -> dict[str, Any]:
    """Tokens that the engine made in the last of so many seconds, by its own count."""
    end, refused = perf_counter() + seconds, 0

    async def one(number: int) -> None:
        nonlocal refused
        body = {"prompt": [number % 512] * 16, "max_tokens": 16, "ignore_eos": True, "user": str(number)}
        while perf_counter() < end:
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                assert answer.status_code == 429, answer.text
                refused += 1
                await asyncio.sleep(float(answer.headers["retry-after"]))

    async def count() -> tuple[float, float]:
        text = (await client.get("/metrics")).text
        line = next(each for each in text.splitlines() if each.startswith("shardwise:generation_tokens_total{"))
        return perf_counter(), float(line.split()[-1])

    asking = [asyncio.ensure_future(one(number)) for number in range(num_clients)]
    await asyncio.sleep(seconds / 4)  # Until all are there.
    first = await count()
    await asyncio.sleep(end - perf_counter())
    last = await count()
    await asyncio.gather(*asking)
    return {"tokens_per_second": round((last[1] - first[1]) / (last[0] - first[0]), 1), "refused": refused}


if __name__ == "__main__":
    sys.exit(main())
