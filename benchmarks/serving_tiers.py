"""KV blocks that move between a GPU, its host and files: what that costs, and what it saves.

python -m benchmarks.serving_tiers qwen3-8b --save      on a machine with a GPU
python -m benchmarks.serving_tiers --quick              a tiny model on any machine: that it runs, not how fast

link       blocks out and in, beside plain copies of pinned memory
decode     32 sequences whose blocks push others out, moved to the host and dropped, in turn; nothing is found again
prompt     a prompt of 8,192 tokens seen before: computed, from the host, from files
clients    clients that talk in turns, with four times the blocks that the cache has room for: with tiers and without
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.record import kept, record
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving.assemble import assemble
from shardwise.serving.engine import LLMEngine
from shardwise.serving.limits import Limits
from shardwise.serving.request import Request, Sampling
from shardwise.serving.sources import read_source
from shardwise.serving.tier_store import TierStore
from shardwise.serving.tiers import Tiers

QUICK = Settings(
    vocabulary=200, width=32, num_layers=2, length=4096, mlp=Mlp(width=64),
    attention=Heads(num_heads=2, num_kv_heads=2, head_dim=16),
)  # fmt: skip
CASES = ("link", "decode", "prompt", "clients")
_draw = random.Random(0)


class Bench:
    """A model, and engines over it with as many blocks as a case asks for."""

    def __init__(self, name: str, *, quick: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
        if quick:
            self.model = Transformer(QUICK)
            initialise(self.model, 0, device="cpu")
            self.model.eval().requires_grad_(False)
        else:
            self.model, _ = read_source(name, random_weights=True, dtype=None, device=self.device)
        self.longest = 512 if quick else 8192
        self.count = 0
        #: Of what was asked last: the longest that the host was at bringing blocks in one step.
        self.reload_seconds = 0.0

    def engine(self, num_tokens: int, **tiers: Any) -> LLMEngine:
        limits = Limits(kv_bytes=num_tokens // 16 * self.block_bytes, max_length=min(num_tokens, 32_768), **tiers)
        return assemble(self.model, limits, seed=0)

    @property
    def block_bytes(self) -> int:
        sizes = self.model.settings.attention
        assert isinstance(sizes, Heads), "a model by heads"
        item = self.model.embed.weight.element_size()
        return self.model.settings.num_layers * 2 * sizes.num_kv_heads * 16 * sizes.head_dim * item

    def prompt(self, length: int) -> list[int]:
        return [_draw.randrange(min(self.model.settings.vocabulary, 10_000)) for _ in range(length)]

    def ask(self, engine: LLMEngine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float, list[int]]:
        """Seconds to the first token and in all, and the tokens of the last prompt."""
        for each in prompts:
            self.count += 1
            sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.add(Request(id=f"r{self.count}", prompt=tuple(each), sampling=sampling))
        self.wait()
        begun, first, told = time.perf_counter(), 0.0, []
        self.reload_seconds = 0.0
        while engine.has_work():
            found = engine.step()
            self.reload_seconds = max(self.reload_seconds, engine.scheduler.reload_seconds)
            if found and not first:
                first = time.perf_counter() - begun
            told += [each.token for each in found if each.request == f"r{self.count}" and each.token is not None]
        return first, time.perf_counter() - begun, told

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def tiers_of(engine: LLMEngine) -> Tiers:
    assert engine.tiers is not None, "it was asked for"
    return engine.tiers


def timed(bench: Bench, run: Callable[[], object]) -> float:
    run()
    bench.wait()
    begun = time.perf_counter()
    for _ in range(3):
        run()
    bench.wait()
    return (time.perf_counter() - begun) / 3


def link(bench: Bench) -> dict[str, float]:
    """Bytes a second, out and in, of blocks and of one plain copy of as many bytes."""
    count = 256
    engine = bench.engine(2 * 16 * count, host_bytes=(count + 1) * bench.block_bytes)
    store = tiers_of(engine).store
    pinned = bench.device.type == "cuda"
    host = torch.empty(count * bench.block_bytes, dtype=torch.uint8, pin_memory=pinned)
    device = torch.empty_like(host, device=bench.device)
    size, found = count * bench.block_bytes, {}
    found["plain out"] = size / timed(bench, lambda: host.copy_(device, non_blocking=True))
    found["plain in"] = size / timed(bench, lambda: device.copy_(host, non_blocking=True))
    turn = 0

    def out() -> None:
        nonlocal turn
        turn += 1
        for block in range(count):
            assert store.put(block, f"{turn} {block}".encode())
        store.fence()

    found["blocks out"] = size / timed(bench, out)
    wanted = [(f"{turn} {block}".encode(), block) for block in range(count)]
    found["blocks in"] = size / timed(bench, lambda: store.bring(wanted))
    engine.close()
    return found


def decode(bench: Bench) -> dict[str, float]:
    """Tokens a second of sequences that push others out, which are moved or dropped."""
    count, each, tokens = (4, 32, 32) if bench.longest == 512 else (32, 128, 256)
    engine = bench.engine(
        count * (each + tokens + 48), host_bytes=6 * count * (each + tokens) // 16 * bench.block_bytes
    )
    tiers = tiers_of(engine)
    pool = engine.scheduler.pool
    rates: dict[str, list[float]] = {"moved": [], "dropped": []}
    for number in range(14):
        name = ("moved", "dropped")[number % 2]
        engine.tiers, pool.on_evict = (tiers, tiers.evict) if name == "moved" else (None, None)
        tiers.store.settle()
        before = tiers.stored_bytes
        _, seconds, _ = bench.ask(engine, [bench.prompt(each) for _ in range(count)], tokens)
        if number >= 4:  # The cache is full, and all is compiled and captured.
            rates[name].append(count * tokens / seconds)
            assert (tiers.stored_bytes > before) == (name == "moved")
    engine.tiers = tiers
    engine.close()
    moved, dropped = (median(rates[name]) for name in ("moved", "dropped"))
    return {"moved": moved, "dropped": dropped, "slower": 1 - moved / dropped}


def prompt(bench: Bench) -> dict[str, float]:
    """Seconds to the first token of a long prompt, and whether its tokens are the same wherever it came from."""
    length, found = bench.longest, {}
    room = 2 * length + length // 4
    with tempfile.TemporaryDirectory() as folder:
        files = {"file_bytes": 8 * length // 16 * bench.block_bytes, "kv_folder": Path(folder)}
        for tier, given in (("host", {"host_bytes": 4 * length // 16 * bench.block_bytes}), ("files", files)):
            engine = bench.engine(room, **given)
            for _ in range(10):  # Steps of few tokens are captured.
                bench.ask(engine, [bench.prompt(20)], 2)
            asked = [bench.prompt(length) for _ in range(3)]
            first, _, _ = bench.ask(engine, asked[:1], 8)
            # What is left to compute rounds as it does behind a beginning that is cached.
            _, _, tokens = bench.ask(engine, asked[:1], 8)
            times = [bench.ask(engine, [each], 8)[0] for each in asked[1:]]
            found["computed"] = min(first, *times)
            store = tiers_of(engine).store
            assert isinstance(store, TierStore), "of one device"
            if store.files is not None:  # What is written by now is there to be read.
                store.files.settle()
                found["files, blocks"], found["files, not kept"] = len(store.files), store.files.num_skipped
            before = tiers_of(engine).loaded_bytes
            again, _, same = bench.ask(engine, asked[:1], 8)
            found[tier], found[f"{tier}, bytes"] = again, tiers_of(engine).loaded_bytes - before
            found[f"{tier}, host at it"] = bench.reload_seconds
            found[f"{tier}, sooner"] = found["computed"] / again
            found[f"{tier}, same tokens"] = float(same == tokens)
            engine.close()
    return found


def clients(bench: Bench) -> dict[str, Any]:
    """Input tokens a second and the mean time to the first token of clients that talk in turns."""
    num_clients, rounds, (fewest, most) = (4, 3, (32, 64)) if bench.longest == 512 else (20, 10, (2000, 4000))
    turns = [[bench.prompt(_draw.randint(fewest, most)) for _ in range(rounds)] for _ in range(num_clients)]
    total = sum(len(each) + 16 for talk in turns for each in talk)
    found: dict[str, Any] = {}
    for name, host in (("with tiers", 2 * total), ("without", 0)):
        engine = bench.engine(max(total // 4, 2 * rounds * most), host_bytes=host // 16 * bench.block_bytes)
        begun, firsts, num_tokens = time.perf_counter(), [], 0
        talks: list[list[int]] = [[] for _ in turns]
        for number in range(rounds):
            for talk, said in zip(talks, turns, strict=True):
                talk += said[number]
                first, _, told = bench.ask(engine, [talk], 16)
                firsts.append(first)
                num_tokens += len(talk)
                talk += told
        seconds = time.perf_counter() - begun
        found[name] = {"input_tokens_per_second": num_tokens / seconds, "first_token_seconds": mean(firsts)}
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--cases", default="link,decode,prompt", help=f"which of them ({','.join(CASES)})")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("no GPU here: nothing is measured (--quick tries it)")
        return
    bench = Bench(arguments.model, quick=arguments.quick)
    by_name = {"link": link, "decode": decode, "prompt": prompt, "clients": clients}
    for case in arguments.cases.split(","):
        told = by_name[case](bench)
        print(case, told, flush=True)
        if arguments.save:
            before = kept("serving_tiers")
            held = before.get(arguments.model, {})
            assert isinstance(held, dict), "cases by name"
            record("serving_tiers", {**before, arguments.model: {**held, case: told}})


if __name__ == "__main__":
    main()
