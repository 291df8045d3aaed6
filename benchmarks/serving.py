"""How fast one GPU serves, with random weights: requests of `serving.md`, and transformers' continuous batching beside.

python -m benchmarks.serving qwen3-0.6b --cases first,one,32,256,idle,transformers --save
python -m benchmarks.serving qwen3-8b --cases one,32 --weights none,fp8,int4 --save
python -m benchmarks.serving --cases bandwidth,sweep,rows,narrow
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.record import kept, record
from shardwise.kernels import few_rows_linear_triton, paged_decode_triton, paged_functions, row_linear_triton
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.gated import Activation
from shardwise.kernels.narrow import make_narrow
from shardwise.kernels.paged_attention import make_tiles, paged_decode, paged_prefill
from shardwise.kernels.row_linear import row_linear
from shardwise.model.catalogue import CATALOGUE
from shardwise.serving import load
from shardwise.serving.client.bench_requests import BenchRequest, make_requests
from shardwise.serving.engine import LLMEngine
from shardwise.serving.load import load_engine
from shardwise.serving.request import Request, Sampling
from shardwise.serving.sources import read_source

#: Bytes a second that an H200's memory gives at best, as measured.
BANDWIDTH = 4.24e12


def answered(engine: LLMEngine, requests: Sequence[BenchRequest], name: str) -> dict[str, float]:
    """All at once, at a temperature of 0.6, without an end: tokens a second, and the time of the first token."""
    for number, each in enumerate(requests):
        sampling = Sampling(max_tokens=each.max_tokens, temperature=0.6, ignore_eos=True)
        engine.add(Request(id=f"{name}{number}", prompt=each.prompt, sampling=sampling))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    count = steps = 0
    first = 0.0
    while engine.has_work():
        told = engine.step()
        steps += 1
        if told and not count:
            first = time.perf_counter() - begun
        count += len(told)
    seconds = time.perf_counter() - begun
    assert count == sum(each.max_tokens for each in requests), f"{count} tokens came"
    return {
        "tokens_per_second": count / seconds,
        "seconds": seconds,
        "first_token_seconds": first,
        "steps": steps,
        "step_milliseconds": seconds / steps * 1e3,
        "preemptions": engine.load().num_preemptions,
    }


def idle(engine: LLMEngine, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """What the GPU does in some decode steps: how long it has nothing to do between them, and what takes its time."""
    for number, each in enumerate(requests):
        engine.add(Request(id=f"i{number}", prompt=each.prompt, sampling=Sampling(max_tokens=200, ignore_eos=True)))
    for _ in range(40):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begun = time.perf_counter()
        for _ in range(60):
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    while engine.has_work():
        engine.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    by_name: dict[str, list[float]] = {}
    gaps, end = 0.0, spans[0][0]
    for begin, until, name in spans:
        by_name.setdefault(name, []).append(until - begin)
        # Within a graph kernels follow each other in a microsecond or two.
        gaps += begin - end if begin - end > 4 else 0.0
        end = max(end, until)
    span = end - spans[0][0]
    busiest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]
    for name, times in busiest:
        print(
            f"    {sum(times) / span:6.1%} {len(times) / 60:7.1f} a step {sum(times) / len(times):8.1f} us  {name[:90]}"
        )
    return {"idle_share": gaps / span, "step_milliseconds": seconds / 60 * 1e3}


def transformers_batching(name: str, requests: Sequence[BenchRequest], weights_seed: int = 0) -> dict[str, float]:
    """The same requests by transformers' continuous batching, its own defaults."""
    import transformers

    config = transformers.AutoConfig.for_model(**CATALOGUE[name])
    torch.manual_seed(weights_seed)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    generation = transformers.GenerationConfig(
        max_new_tokens=1024, do_sample=True, temperature=0.6, eos_token_id=-1, pad_token_id=0
    )
    manager = model.eval().init_continuous_batching(generation_config=generation)
    manager.start()
    try:
        begun = time.perf_counter()
        for each in requests:
            manager.add_request(list(each.prompt), max_new_tokens=each.max_tokens)
        done = count = 0
        while done < len(requests) and time.perf_counter() - begun < 80:
            found = manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                done, count = done + 1, count + len(found.generated_tokens)
            elif found is None and not manager.is_running():
                break
        seconds = time.perf_counter() - begun
    finally:
        manager.stop(block=True)
    return {"tokens_per_second": count / seconds, "seconds": seconds, "finished": done}


def timed(run: Callable[[], object], count: int = 20) -> float:
    """Seconds of one call as a graph, by the GPU's clock, after a few to warm up."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    run = graph.replay
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count / 1e3


def decode_case(num_sequences: int, length: int, num_layers: int, heads: int = 32, block_size: int = 16) -> Any:
    """Paged decode of sequences whose blocks lie in no order, in a cache with as many layers as a model has."""
    width = length // block_size
    layers = max(1, min(num_layers, int(60e9 / (num_sequences * length * 8 * 128 * 4))))
    cache = torch.randn(num_sequences * width, layers, 2, 8, block_size, 128, dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(num_sequences * width, device="cuda").int().view(num_sequences, width)
    lengths = torch.full((num_sequences,), length, dtype=torch.int32, device="cuda")
    query = torch.randn(num_sequences, heads, 128, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for layer in range(min(layers, 8)):
            paged_decode(query, cache[:, layer, 0], cache[:, layer, 1], tables, lengths, scale=0.1)

    return run, min(layers, 8) * num_sequences * length * 8 * 128 * 4


def bandwidth() -> dict[str, float]:
    found = {}
    for num_sequences, length in ((32, 4096), (64, 4096), (128, 2048), (256, 1024), (256, 512), (8, 4096), (1, 4096)):
        run, num_bytes = decode_case(num_sequences, length, 36)
        rate = num_bytes / timed(run)
        found[f"{num_sequences} x {length}"] = rate
        print(f"  paged decode {num_sequences:4} x {length:5}: {rate / 1e12:.2f} TB/s, {rate / BANDWIDTH:.0%}")
        del run
        torch.cuda.empty_cache()
    return found


def prefill_speed() -> dict[str, float]:
    found = {}
    for count, length in ((1, 8192), (16, 512)):
        blocks = torch.randn(count * length // 16, 2, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
        tables = torch.randperm(len(blocks), device="cuda").int().view(count, -1)
        query = torch.randn(count * length, 32, 128, dtype=torch.bfloat16, device="cuda")
        starts = [length * each for each in range(count + 1)]
        told = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([length] * count, starts)]
        tiles = torch.tensor(make_tiles(starts), dtype=torch.int32, device="cuda")
        out = torch.empty_like(query)
        seconds = timed(lambda: paged_prefill(query, blocks[:, 0], blocks[:, 1], tables, *told, tiles, out, scale=0.1))  # noqa: B023
        found[f"{count} x {length}"] = 2 * count * length**2 * 32 * 128 / seconds
        print(f"  paged prefill {count:3} x {length}: {found[f'{count} x {length}'] / 1e12:.0f} TFLOP/s")
    return found


def sweep() -> None:
    """Other tiles, warps and parts of the decode, at 32 and at 256 sequences."""
    file = paged_decode_triton
    for num_sequences, length in ((32, 4096), (256, 1024)):
        run, num_bytes = decode_case(num_sequences, length, 8)
        for keys, warps, tiles in (
            (32, 2, 2),
            (32, 4, 3),
            (64, 4, 1),
            (64, 4, 2),
            (64, 4, 3),
            (64, 8, 2),
            (128, 4, 1),
            (128, 8, 1),
        ):
            for programs in (4, 8, 16):
                file.DECODE_KEYS, file.DECODE_WARPS, file.DECODE_TILES = keys, warps, tiles
                paged_functions.PROGRAMS = programs
                rate = num_bytes / timed(run, 5)
                chosen = f"keys {keys} warps {warps} tiles {tiles} programs {programs}"
                print(f"  {num_sequences} x {length} {chosen}: {rate / BANDWIDTH:.0%}")
        del run
        torch.cuda.empty_cache()


def rows() -> None:
    """Other tiles of the products of one sequence and of 32: the layers of Qwen3-0.6B and 8B, one after the other."""
    one, few = row_linear_triton, few_rows_linear_triton
    for width, inner, qkv, layers in ((1024, 3072, 4096, 28), (4096, 12288, 6144, 36)):
        out = qkv // 2 if width == 1024 else 4096
        shapes = [(qkv, width), (width, out), (2 * inner, width), (width, inner)]
        weights = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers) for shape in shapes]
        given = {k: torch.randn(32, k, device="cuda", dtype=torch.bfloat16) for _, k in shapes}
        norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)

        def run_one() -> None:
            for number, weight in enumerate(weights):  # noqa: B023
                has_norm, has_gate = number % 4 in (0, 2), number % 4 == 2
                row_linear(
                    given[weight.shape[1]][:1], weight, norm=norm if has_norm else None,  # noqa: B023
                    activation="silu" if has_gate else None,
                )  # fmt: skip

        def run_few() -> None:
            for number, weight in enumerate(weights):  # noqa: B023
                few_rows_linear(given[weight.shape[1]], weight, activation="silu" if number % 4 == 2 else None)  # noqa: B023

        num_bytes = sum(each.nbytes for each in weights)
        for tile, columns, stages in itertools.product((4096, 8192, 16384), (1024, 2048), (2, 3, 4)):
            one.WIDE = one.GATED = one.GATED_WIDE = one.RowTile(tile, columns, stages, 8)
            share = num_bytes / timed(run_one, 5) / BANDWIDTH
            print(f"  {width}, 1 row: tile {tile} columns {columns} stages {stages}: {share:.0%}")
        for plain, gated in itertools.product(
            (few.Tile(64, 128, 6, 4), few.Tile(32, 256, 6, 2)), (few.Tile(64, 64, 5, 4), few.Tile(32, 128, 4, 4))
        ):
            few.NARROW = few.WIDE = plain
            few.GATED = gated
            share = num_bytes / timed(run_few, 5) / BANDWIDTH
            print(f"  {width}, 32 rows: {tuple(plain)} and with a gate {tuple(gated)}: {share:.0%}")
        weights.clear()
        torch.cuda.empty_cache()


def narrow_rows() -> dict[str, float]:
    """Products of an 8B's layers with weights in fewer bits: the share of the bandwidth at which they are read, and, of
    so many rows that they are made wide, times the seconds of bf16."""
    found = {}
    shapes = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    for kind, rows in itertools.product(("fp8", "int4"), (1, 2, 16, 32, 64, 128, 2048)):
        for n, k in shapes:
            plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            weights = [make_narrow(each, kind) for each in plain]
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            activation: Activation | None = "silu" if n == 24576 else None

            def run(weights: Sequence[Any]) -> None:
                for weight in weights:
                    if rows == 1:  # noqa: B023
                        row_linear(x, weight, activation=activation)  # noqa: B023
                    else:
                        few_rows_linear(x, weight, activation=activation)  # noqa: B023

            seconds, wide = timed(partial(run, weights), 5), timed(partial(run, plain), 5)
            num_bytes = sum(each.codes.nbytes + each.scales.nbytes for each in weights)
            found[f"{kind} {rows} x {n} x {k}"] = num_bytes / seconds
            print(
                f"  {kind}, {rows:4} rows, {n:5} x {k:5}: {num_bytes / seconds / BANDWIDTH:4.0%} of the bandwidth,"
                f" {seconds / 4 * 1e6:6.1f} us, {wide / seconds:.2f} x as fast as bf16"
            )
            del plain, weights
            torch.cuda.empty_cache()
    return found


def measure(name: str, cases: Sequence[str], weights: str | None, keep: Callable[[dict[str, Any]], None]) -> None:
    """Of one model; `keep` is given each figure as soon as there is one."""
    if "transformers" in cases:
        keep({"transformers": transformers_batching(name, make_requests("256-requests"))})
        torch.cuda.empty_cache()
    if not set(cases) - {"transformers"}:
        return
    weights_in = 0.0

    def read(*given: Any, **options: Any) -> Any:
        nonlocal weights_in
        made = read_source(*given, **options)
        torch.cuda.synchronize()
        weights_in = time.perf_counter()
        return made

    begun = time.perf_counter()
    with patch.object(load, "read_source", read):
        engine = load_engine(name, random_weights=True, max_length=4096, weights=weights)
    assert isinstance(engine, LLMEngine), "one device"
    torch.cuda.synchronize()
    keep({"ready_seconds": time.perf_counter() - begun, "num_blocks": engine.summary.num_blocks})
    plan = {"first": "tiny", "one": "one-sequence", "32": "32-sequences", "256": "256-requests"}
    if "first" in cases:
        asked = time.perf_counter()
        figures = answered(engine, make_requests("tiny")[:1], "first")
        # What is compiled ahead is waited for before the engine is ready.
        figures["after_weights_seconds"] = asked - weights_in + figures["first_token_seconds"]
        keep({"first": figures})
    for case in ("one", "32", "256"):
        if case not in cases:
            continue
        # Graphs of prompts are captured at their third time: the last of four is what is kept.
        often = 1 if case == "256" else 4
        for turn in ("cold", *often * ("first",), *often * ("again",)):
            if turn == "first":
                engine.scheduler.pool.forget()
            keep({f"{case} {turn}": answered(engine, make_requests(plan[case]), f"{case} {turn} ")})
    for case, asked_for in (("idle", "32-sequences"), ("idle1", "one-sequence"), ("idle256", "256-requests")):
        if case in cases:
            keep({case: idle(engine, make_requests(asked_for))})
    engine.close()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--cases", default="first,one,32,256,idle")
    parser.add_argument("--weights", default="none", help="none, fp8, int4, or several of them")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    cases = arguments.cases.split(",")

    def keep(label: str, figures: dict[str, Any]) -> None:
        for name, each in figures.items():
            rate = f"{each['tokens_per_second']:,.0f} tokens/s " if isinstance(each, dict) and len(each) > 3 else ""
            print(f"  {name}: {rate}{each}", flush=True)
        if arguments.save:
            before = kept("serving")
            held = before.get(label)
            record("serving", {**before, label: {**(held if isinstance(held, dict) else {}), **figures}})

    if "bandwidth" in cases:
        keep("paged decode", bandwidth())
    if "prefill" in cases:
        keep("paged prefill", prefill_speed())
    if "sweep" in cases:
        sweep()
    if "rows" in cases:
        rows()
    if "narrow" in cases:
        keep("narrow rows", narrow_rows())
    for name, weights in itertools.product(arguments.models, arguments.weights.split(",")):
        label = name if weights == "none" else f"{name} {weights}"
        print(label)
        measure(name, cases, None if weights == "none" else weights, partial(keep, label))


if __name__ == "__main__":
    main()
