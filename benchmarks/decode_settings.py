"""Decode steps of one engine with other settings of its kernels: tiles, and what is computed by which.

python -m benchmarks.decode_settings qwen3-8b --rows 32                      less than a minute each, on a GPU
python -m benchmarks.decode_settings qwen3-0.6b --rows 1
python -m benchmarks.decode_settings qwen3-8b --rows 32 --weights int4

Settings are tried in turns in one process, each twice, so that what differs between machines or minutes is not taken
for theirs. All are compiled first, by many threads. Lines are milliseconds of a step, the better of both turns, and how
much faster that is than the first line: as it is.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels import few_rows_linear_triton as few
from shardwise.kernels import row_linear_triton as one
from shardwise.kernels.compile_ahead import compile_all
from shardwise.kernels.few_rows_linear_triton import Tile
from shardwise.kernels.launch import Gpu, Launch, gpu_of
from shardwise.kernels.row_linear_triton import RowTile
from shardwise.serving import fused_layers, warm_up
from shardwise.serving.client.bench_requests import make_requests
from shardwise.serving.device_runner import DeviceRunner
from shardwise.serving.engine import LLMEngine
from shardwise.serving.limits import Limits
from shardwise.serving.load import load_engine
from shardwise.serving.request import Request, Sampling
from shardwise.serving.sources import find_shape

#: Names of modules' values, and what they are set to.
Setting = dict[tuple[Any, str], Any]
#: Steps that are timed, behind those in which prompts are read and graphs captured.
STEPS, BEFORE = 64, 6


def of_one_row() -> Iterator[tuple[str, Setting]]:
    """Weights as they are. Fewer numbers a tile: more programs, of which products with few outputs have too few."""
    for tile in ((8192, 1024, 3, 8), (8192, 1024, 3, 4), (4096, 1024, 4, 4), (16384, 1024, 4, 8), (16384, 2048, 2, 8)):
        yield f"plain {tile}", {(one, "WIDE"): RowTile(*tile)}
    for tile in ((8192, 1024, 3, 4), (16384, 1024, 3, 8), (16384, 1024, 2, 4), (32768, 2048, 2, 8)):
        yield f"gated {tile}", {(one, "GATED"): RowTile(*tile), (one, "GATED_WIDE"): RowTile(*tile)}
    for most in (0, 1024, 3072, 4096):
        yield f"whole rows up to {most}", {(one, "WHOLE_ROWS"): most}
        small = RowTile(8192, 1024, 3, 8)
        yield f"whole rows up to {most}, plain half", {(one, "WHOLE_ROWS"): most, (one, "WIDE"): small}
    for ahead in (1024, 4096):
        yield f"ahead {ahead}", {(one, "AHEAD"): ahead}


def of_few_rows() -> Iterator[tuple[str, Setting]]:
    """Weights as they are, without splits of columns and with them, by older products of tensor cores and newer."""
    for tile in (
        (32, 256, 6, 2),
        (64, 128, 5, 4, 1),
        (64, 128, 4, 4, 2),
        (64, 64, 8, 4, 1),
        (64, 256, 3, 4, 1),
        (128, 64, 6, 4, 1),
    ):
        yield f"plain {tile}", {(few, name): Tile(*tile) for name in ("NARROW", "WIDE")}
    for tile in (
        (64, 64, 5, 4),
        (32, 128, 5, 2),
        (32, 128, 4, 4),
        (32, 64, 6, 2),
        (32, 256, 3, 4),
        (32, 128, 4, 2, 4),
        (16, 256, 4, 2),
    ):
        yield f"gated {tile}", {(few, "GATED"): Tile(*tile)}
    for ahead in (256, 4096):
        yield f"ahead {ahead}", {(few, "AHEAD"): ahead}


def of_few_narrow_rows(kind: str) -> Iterator[tuple[str, Setting]]:
    """Tiles of codes multiplied place by place, as they are, and as a whole."""

    def both(plain: Tile, gated: Tile) -> Setting:
        tiles = {**few.NARROW_TILES}
        tiles[kind, False], tiles[kind, True] = (dict.fromkeys((16, 32, 64), each) for each in (plain, gated))
        return {(few, "NARROW_TILES"): tiles}

    whole = {
        key: {rows: tile._replace(is_whole=True) for rows, tile in tiles.items()}
        for key, tiles in few.NARROW_TILES.items()
    }
    yield "whole, the same tiles", {(few, "NARROW_TILES"): whole}
    for rows, stages, warps, programs in (
        (64, 4, 4, 3),
        (64, 5, 4, 4),
        (64, 3, 2, 6),
        (64, 4, 2, 4),
        (128, 3, 4, 2),
        (128, 4, 4, 3),
    ):
        plain = Tile(rows, 128, stages, warps, programs, True)
        yield f"whole {tuple(plain)[:5]}", both(plain, plain._replace(rows=64))


def settings_for(weights: str | None, rows: int) -> list[tuple[str, Setting]]:
    if weights is None:
        return [("as it is", {}), *(of_one_row() if rows == 1 else of_few_rows())]
    found: list[tuple[str, Setting]] = [("as it is", {}), *of_few_narrow_rows(weights)]
    if rows > 1:
        return found
    by_few, by_row = (fused_layers, "BY_FEW"), {(fused_layers, "BY_FEW"): ()}
    others = [(f"few rows, {name}", {by_few: (weights,), **setting}) for name, setting in found]
    return [("as it is", {}), ("by one row", by_row), *others]


@contextmanager
def set_to(setting: Setting) -> Iterator[None]:
    with ExitStack() as stack:
        for (module, name), value in setting.items():
            stack.enter_context(patch.object(module, name, value))
        yield


def find_launches(name: str, weights: str | None, rows: int, gpu: Gpu) -> list[Launch]:
    """Of a decode step, as the settings are now."""
    shape = find_shape(name, random_weights=True, dtype=None, device=torch.device("cuda"))
    assert shape is not None, "a catalogue's name"

    def steps(_: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
        yield rows * [(200, 1)], 0

    with patch.object(warm_up, "_steps", steps):
        return list(warm_up.find_launches(*shape, replace(Limits(max_length=4096), weights=weights), gpu))


def step_seconds(engine: LLMEngine, rows: int, name: str) -> float:
    runner = engine.runner
    assert isinstance(runner, DeviceRunner), "on a GPU"
    runner._graphs._captured.clear()
    runner._graphs._pool = None  # It went with its last graph.
    runner._graphs._is_on = torch.cuda.is_available()  # It is off where a setting before this one had no room.
    requests = make_requests("32-sequences")[:rows]
    for number, each in enumerate(requests):
        sampling = Sampling(max_tokens=STEPS + 4 * BEFORE, temperature=0.6, ignore_eos=True)
        engine.add(Request(id=f"{name}{number}", prompt=each.prompt, sampling=sampling))
    told: set[str] = set()
    while len(told) < rows:
        told |= {each.request for each in engine.step()}
    for _ in range(BEFORE):
        engine.step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / STEPS
    for number in range(rows):
        engine.cancel(f"{name}{number}")
    while engine.has_work():
        engine.step()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32, help="sequences: 1, or up to 32")
    parser.add_argument("--weights", choices=("fp8", "int4"))
    arguments = parser.parse_args()
    name, rows, weights = arguments.model, arguments.rows, arguments.weights
    settings, is_gpu = settings_for(weights, rows), torch.cuda.is_available()
    gpu = gpu_of(torch.device("cuda", 0)) if is_gpu else Gpu(num_processors=132, overlaps=True)
    launches: dict[Any, Launch] = {}
    for _, setting in settings:
        with set_to(setting):
            launches.update((each.key(), each) for each in find_launches(name, weights, rows, gpu))
    if not is_gpu:
        print(f"no GPU here: nothing is measured ({len(settings)} settings, {len(launches)} programs)")
        return
    begun, device = time.perf_counter(), torch.cuda.current_device()
    count = compile_all(launches.values(), before=lambda: torch.cuda.set_device(device))
    print(f"compiled {count} programs in {time.perf_counter() - begun:.0f} s", flush=True)
    engine = load_engine(name, random_weights=True, max_length=4096, weights=weights)
    assert isinstance(engine, LLMEngine), "one device"
    step_seconds(engine, rows, "first ")
    found: dict[str, float] = {}
    for turn in range(2):
        for label, setting in settings:
            try:
                with set_to(setting):
                    seconds = step_seconds(engine, rows, f"{turn} {label} ")
            except Exception as error:  # What has no room in a processor.
                print(f"{label}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                engine.recover()
                continue
            found[label] = min(found.get(label, seconds), seconds)
    base = found["as it is"]
    for label, seconds in sorted(found.items(), key=lambda each: each[1]):
        print(f"{1e3 * seconds:7.3f} ms  {rows / seconds:8,.0f} tokens/s  {base / seconds - 1:+.1%}  {label}")
    print(f"{time.perf_counter() - begun:.0f} s")
    engine.close()


if __name__ == "__main__":
    main()
