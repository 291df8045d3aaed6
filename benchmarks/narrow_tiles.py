"""Tiles of products with narrow weights (`NARROW_TILES` of `kernels/few_rows_linear_triton.py`), tried on a GPU.

python -m benchmarks.narrow_tiles [--rows 16,32,64] [--whole]      less than a minute; ends with the table, to be pasted

With `--whole` tiles of codes are multiplied as a whole, not place by place.

All candidates are compiled first, by many threads. Products are those of a Qwen3-8B's layer. Each is timed as a graph
over more weights than a GPU's cache holds, with every number of programs a processor.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from unittest.mock import patch

import torch

from shardwise.kernels import few_rows_linear_triton as few
from shardwise.kernels.compile_ahead import compile_all
from shardwise.kernels.few_rows_linear import few_rows_linear
from shardwise.kernels.few_rows_linear_triton import Tile
from shardwise.kernels.launch import Gpu, Launch, Rehearsal, gpu_of
from shardwise.kernels.narrow import KINDS, RUN, NarrowWeight, make_narrow

#: Outputs and inputs, without a gate and with one.
SHAPES = {False: ((6144, 4096), (4096, 4096), (4096, 12288)), True: ((24576, 4096),)}
PROGRAMS = (1, 2, 3, 4, 6)
#: Bytes that are read before any of them is read again.
APART = 150e6


def tiles_of(kind: str, is_whole: bool) -> list[Tile]:
    """Rows, columns, stages, warps. Two warps multiply as older GPUs do."""
    if is_whole:
        found = [(64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 3, 2), (64, 128, 4, 2), (128, 128, 3, 4), (32, 128, 4, 2)]
        return [Tile(*each, 0, True) for each in found + ([(64, 256, 3, 4)] if kind == "fp8" else [])]
    if kind == "fp8":
        return [Tile(64, 128, 3, 4), Tile(64, 128, 4, 4), Tile(64, 128, 6, 4), Tile(64, 256, 3, 4), Tile(32, 128, 4, 2)]
    return [Tile(64, RUN, 3, 4), Tile(64, RUN, 4, 4), Tile(64, RUN, 7, 4), Tile(32, RUN, 5, 2)]


def product(weight: NarrowWeight, x: torch.Tensor, tile: Tile, has_gate: bool) -> None:
    chosen = {(weight.kind, has_gate): dict.fromkeys((16, 32, 64), tile)}
    with patch.dict(few.NARROW_TILES, chosen):
        few_rows_linear(x, weight, activation="silu" if has_gate else None)


def find_launches(gpu: Gpu, all_rows: Sequence[int], is_whole: bool) -> Iterable[Launch]:
    """Of all candidates, with columns that are split, and that are not."""
    with Rehearsal(gpu) as seen, torch.device("meta"):
        for kind in KINDS:
            for has_gate, shapes in SHAPES.items():
                for n, k in shapes:
                    weight = make_narrow(torch.empty(n, k, dtype=torch.bfloat16), kind)
                    for rows in all_rows:
                        x = torch.empty(rows, k, dtype=torch.bfloat16)
                        for tile in tiles_of(kind, is_whole):
                            for programs in PROGRAMS:
                                product(weight, x, tile._replace(programs=programs), has_gate)
    return seen.launches.values()


def timed(weights: Sequence[NarrowWeight], x: torch.Tensor, tile: Tile, has_gate: bool) -> float:
    """Seconds of one product."""

    def run() -> None:
        for weight in weights:
            product(weight, x, tile, has_gate)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    found = []
    for _ in range(4):
        begun.record()
        graph.replay()
        over.record()
        over.synchronize()
        found.append(begun.elapsed_time(over) / 1e3 / len(weights))
    return min(found[1:])


def choose(kind: str, has_gate: bool, rows: int, is_whole: bool) -> Tile:
    """The tile that is fastest over all of the products of one table's entry."""
    totals: dict[Tile, float] = {}
    num_bytes = 0
    for n, k in SHAPES[has_gate]:
        first = make_narrow(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5, kind)
        each = first.codes.nbytes + first.scales.nbytes
        weights = [first, *(
            NarrowWeight(kind=kind, codes=first.codes.clone(), scales=first.scales, inputs=k, dtype=first.dtype)
            for _ in range(int(APART // each))
        )]  # fmt: skip
        num_bytes += each
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        tiles = {each._replace(programs=count) for each in tiles_of(kind, is_whole) for count in PROGRAMS}
        for chosen in {*tiles, few.NARROW_TILES[kind, has_gate][rows]}:
            seconds = float("inf")
            with suppress(Exception):  # What has no room in a processor.
                seconds = timed(weights, x, chosen, has_gate)
            totals[chosen] = totals.get(chosen, 0.0) + seconds
    ranked = sorted(totals.items(), key=lambda each: each[1])
    told = "; ".join(f"{tuple(tile)} {1e6 * seconds:.1f} us" for tile, seconds in ranked[:4])
    before = next((s for tile, s in ranked if tile == few.NARROW_TILES[kind, has_gate][rows]), float("nan"))
    share = num_bytes / ranked[0][1] / 4.24e12
    print(f"{kind}, gate {has_gate}, {rows} rows: {told} | now {1e6 * before:.1f} us | {share:.0%} of the bandwidth")
    return ranked[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="16,32,64", help="rows of x")
    parser.add_argument("--whole", action="store_true", help="tiles of codes that are multiplied as a whole")
    arguments = parser.parse_args()
    all_rows, is_whole = [int(each) for each in arguments.rows.split(",")], arguments.whole
    if not torch.cuda.is_available():
        launches = find_launches(Gpu(num_processors=132, overlaps=True), all_rows, is_whole)
        print(f"no GPU here: nothing is measured ({len(list(launches))} programs would be compiled)")
        return
    begun, device = time.perf_counter(), torch.device("cuda", torch.cuda.current_device())
    count = compile_all(find_launches(gpu_of(device), all_rows, is_whole), before=lambda: torch.cuda.set_device(device))
    print(f"compiled {count} programs in {time.perf_counter() - begun:.0f} s", flush=True)

    lines = []
    for kind in KINDS:
        for has_gate in (False, True):
            chosen = {rows: choose(kind, has_gate, rows, is_whole) for rows in all_rows}
            told = ", ".join(f"{rows}: Tile{tuple(tile)}" for rows, tile in chosen.items())
            lines.append(f'    ("{kind}", {has_gate}): {{{told}}},')
    print("NARROW_TILES = {", *lines, sep="\n")
    print(f"}}\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
