"""Six reference flows, each with the bytes that it has to move, counted by hand.

Each is one sequential program over a list of places: with one place it runs there, with four on all four. Tests and
benchmarks compare the machine with them, and they are short enough to serve as examples of its use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.machine import Machine

SIZE = 32  # Rows and columns of a tile.
_TILE_BYTES = 4 * SIZE * SIZE
_ROW_BYTES = 4 * SIZE
_CHAIN_TASKS, _TILES, _STEPS, _MICROBATCHES = 8, 4, 6, 8

#: Bytes that arrive at each of four places from the host and from other places.
Arrivals = dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A program, and what arrives at each of four places when it runs there. Tasks take `seconds` of simulated time."""

    name: str
    run: Callable[[Machine, Sequence[str], float], list[Data]]
    arriving_bytes: Arrivals


def chain(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """Run one task after another, each at the next place.

    The input goes to place 0; then the value goes 0 to 1 to 2 to 3 to 0 to 1 to 2 to 3: two arrivals everywhere.
    """
    value = machine.data(_tile(0), name="x")
    for number in range(_CHAIN_TASKS):
        made = machine.empty((SIZE, SIZE), name=f"y{number}")
        place = places[number % len(places)]
        machine.submit(torch.mul, value, 1.25, into=made, place=place, seconds=seconds, name=f"scale{number}")
        value = made
    return [value]


def diamond(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """One value, two paths, one result: the input to place 0, its result to place 1, and the result of that back."""
    here, there = places[0], places[1 % len(places)]
    top = machine.data(_tile(1), name="top")
    left, right, middle, bottom = (
        machine.empty((SIZE, SIZE), name=name) for name in ("left", "right", "middle", "bottom")
    )
    machine.submit(torch.mul, top, 2.0, into=middle, place=here, seconds=seconds)
    machine.submit(torch.sin, middle, into=left, place=here, seconds=seconds)
    machine.submit(torch.cos, middle, into=right, place=there, seconds=seconds)
    machine.submit(torch.add, left, right, into=bottom, place=here, seconds=seconds)
    return [bottom]


def tiled_matmul(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """C = A B in 4 x 4 tiles. Each of four places owns 2 x 2 tiles of C and needs 2 rows of A and 2 columns of B.

    That is 8 tiles of each: 16 tiles arrive at every place, each once, though each is used twice.
    """
    numbers = range(_TILES)
    a, b = (
        {(i, j): machine.data(_tile(base + i * _TILES + j), name=f"{letter}{i}{j}") for i in numbers for j in numbers}
        for letter, base in (("a", 100), ("b", 200))
    )
    c = {(i, j): machine.empty((SIZE, SIZE), name=f"c{i}{j}") for i in numbers for j in numbers}
    half = _TILES // 2
    for k in numbers:
        for i in numbers:
            for j in numbers:
                place = places[(i // half * 2 + j // half) % len(places)]
                name = f"c{i}{j}+{k}"
                if k == 0:
                    machine.submit(torch.mm, a[i, k], b[k, j], into=c[i, j], place=place, seconds=seconds, name=name)
                else:
                    machine.submit(
                        _add_product, c[i, j], a[i, k], b[k, j], reads=[c[i, j], a[i, k], b[k, j]], writes=[c[i, j]],
                        place=place, seconds=seconds, name=name,
                    )  # fmt: skip
    return list(c.values())


def split_mlp(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """Two layers, the first cut by columns and the second by rows: nothing is exchanged between them.

    At every place arrive a tile of input and two tiles of weights; at place 0 the sums of the other three as well.
    """
    x = machine.data(_tile(300), name="x")
    parts = []
    for number in range(4):
        place = places[number % len(places)]
        first, second = (machine.data(_tile(310 + 2 * number + each), name=f"w{each}.{number}") for each in range(2))
        hidden, part = (machine.empty((SIZE, SIZE), name=f"{name}{number}") for name in ("hidden", "part"))
        machine.submit(_layer, x, first, into=hidden, place=place, seconds=seconds, name=f"up{number}")
        machine.submit(torch.mm, hidden, second, into=part, place=place, seconds=seconds, name=f"down{number}")
        parts.append(part)
    total = machine.empty((SIZE, SIZE), name="total")
    machine.submit(_sum, *parts, into=total, place=places[0], seconds=seconds, name="sum")
    return [total]


def stencil(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """Compute the mean of each row and its neighbours, repeatedly. Blocks of rows are cut over four places.

    Its block arrives at every place; then, in every step, a row from each neighbour. The rows at the edges are computed
    first, so that they are sent while the rows between them are computed.
    """
    blocks = [[machine.data(_tile(400 + p), name=f"u{p}"), machine.empty((SIZE, SIZE), name=f"v{p}")] for p in range(4)]
    edges = [[_rows(machine, p, parity) for parity in range(2)] for p in range(4)]
    at = [places[p % len(places)] for p in range(4)]
    for p in range(4):
        machine.submit(_cut_edges, blocks[p][0], into=edges[p][0], place=at[p], seconds=seconds / 10, name=f"cut{p}")
    for step in range(_STEPS):
        old, new = step % 2, (step + 1) % 2
        for p in range(4):
            above = edges[p - 1][old][1] if p > 0 else None
            below = edges[p + 1][old][0] if p < 3 else None
            machine.submit(
                _edges, blocks[p][old], above, below, into=edges[p][new], place=at[p], seconds=seconds / 10,
                name=f"edges{p}.{step}",
            )  # fmt: skip
        for p in range(4):
            machine.submit(
                _interior, blocks[p][old], *edges[p][new], into=blocks[p][new], place=at[p], seconds=seconds,
                name=f"inside{p}.{step}",
            )  # fmt: skip
    return [block[_STEPS % 2] for block in blocks]


def pipeline(machine: Machine, places: Sequence[str], seconds: float) -> list[Data]:
    """Four layers at four places, and eight microbatches through them.

    At every place arrive its weights, and then a tile for each microbatch: inputs at the first, activations elsewhere.
    """
    weights = [machine.data(_tile(500 + stage), name=f"w{stage}") for stage in range(4)]
    results = []
    for microbatch in range(_MICROBATCHES):
        value = machine.data(_tile(510 + microbatch), name=f"x{microbatch}")
        for stage, weight in enumerate(weights):
            made = machine.empty((SIZE, SIZE), name=f"y{stage}.{microbatch}")
            place = places[stage % len(places)]
            machine.submit(_layer, value, weight, into=made, place=place, seconds=seconds, name=f"{stage}F{microbatch}")
            value = made
        results.append(value)
    return results


FLOWS = (
    Flow(name="chain", run=chain, arriving_bytes=dict.fromkeys(range(4), 2 * _TILE_BYTES)),
    Flow(name="diamond", run=diamond, arriving_bytes={0: 2 * _TILE_BYTES, 1: _TILE_BYTES}),
    Flow(name="tiled matmul", run=tiled_matmul, arriving_bytes=dict.fromkeys(range(4), 16 * _TILE_BYTES)),
    Flow(
        name="split mlp",
        run=split_mlp,
        arriving_bytes={0: 6 * _TILE_BYTES, **dict.fromkeys(range(1, 4), 3 * _TILE_BYTES)},
    ),
    Flow(
        name="stencil",
        run=stencil,
        arriving_bytes={p: _TILE_BYTES + _STEPS * _ROW_BYTES * (1 if p in (0, 3) else 2) for p in range(4)},
    ),
    Flow(name="pipeline", run=pipeline, arriving_bytes=dict.fromkeys(range(4), (1 + _MICROBATCHES) * _TILE_BYTES)),
)


def _tile(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 0.2


def _rows(machine: Machine, p: int, parity: int) -> list[Data]:
    return [machine.empty((SIZE,), name=f"{side}{p}.{parity}") for side in ("top", "bottom")]


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    total.addmm_(one, other)


def _layer(value: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(value @ weight)


def _sum(*parts: Tensor) -> Tensor:
    return torch.stack(parts).sum(dim=0)


def _cut_edges(block: Tensor) -> tuple[Tensor, Tensor]:
    return block[0], block[-1]


def _edges(block: Tensor, above: Tensor | None, below: Tensor | None) -> tuple[Tensor, Tensor]:
    top, bottom = (torch.zeros_like(block[0]) if each is None else each for each in (above, below))
    return (top + block[0] + block[1]) / 3, (block[-2] + block[-1] + bottom) / 3


def _interior(block: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    made = block.clone()
    made[1:-1] = (block[:-2] + block[1:-1] + block[2:]) / 3
    made[0], made[-1] = top, bottom
    return made
