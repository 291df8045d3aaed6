"""Which blocks a tier should keep: hits of LRU and of ARC on what requests ask for, in a tier of 2,000 blocks.

rounds    40 clients talk in turns: every turn asks for all blocks of the talk so far, and adds some
system    half of the requests begin with one of 20 long prompts, drawn by Zipf's law; all else is seen once
documents a few documents are asked about again and again, while others are read once, all of them long
loop      25 talks in a fixed order that together have a quarter more blocks than fit: the worst case of LRU

python benchmarks/kv_eviction.py
"""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from record import record

from shardwise.serving.eviction import Arc

SIZE = 2000


def main() -> int:
    results = {}
    for name, asks in {"rounds": rounds, "system": system, "documents": documents, "loop": loop}.items():
        results[name] = {"lru": round(hits(Lru(), asks()), 4), "arc": round(hits(Arc(SIZE), asks()), 4)}
        print(name, results[name])
    record("kv_eviction", {"blocks": SIZE, "hit_share": results})
    return 0


class Lru:
    """With the methods of `Arc`: who was longest not asked for goes first."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def add(self, name: bytes) -> None:
        self._names[name] = None

    def touch(self, name: bytes) -> None:
        self._names.move_to_end(name)

    def evict(self) -> bytes:
        return self._names.popitem(last=False)[0]

    def remove(self, name: bytes) -> None:
        del self._names[name]


def hits(policy: Arc | Lru, requests: Iterator[list[int]]) -> float:
    """The share of blocks that were there. A request's blocks after the first that is missing are computed."""
    found = asked = 0
    for blocks in requests:
        names = [str(block).encode() for block in blocks]
        asked += len(names)
        is_chain = True
        for name in names:
            is_chain = is_chain and name in policy
            found += is_chain
        for name in names:
            if name in policy:
                policy.touch(name)
                continue
            if len(policy) >= SIZE:
                policy.evict()
            policy.add(name)
    return found / asked


def rounds() -> Iterator[list[int]]:
    draw, numbers = random.Random(0), count()
    talks: list[list[int]] = [[] for _ in range(40)]
    for _ in range(4000):
        which = draw.randrange(len(talks))
        talks[which] += [next(numbers) for _ in range(draw.randint(4, 16))]
        yield list(talks[which])
        if len(talks[which]) > 160:
            talks[which] = []


def system() -> Iterator[list[int]]:
    draw, numbers = random.Random(1), count()
    prompts = [[next(numbers) for _ in range(64)] for _ in range(20)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    for _ in range(4000):
        begins = draw.choices(prompts, weights)[0] if draw.random() < 0.5 else []
        yield begins + [next(numbers) for _ in range(draw.randint(16, 128))]


def documents() -> Iterator[list[int]]:
    draw, numbers = random.Random(2), count()
    known = [[next(numbers) for _ in range(200)] for _ in range(8)]
    for _ in range(2000):
        yield draw.choice(known) if draw.random() < 0.3 else [next(numbers) for _ in range(200)]


def loop() -> Iterator[list[int]]:
    talks = [[100 * which + place for place in range(100)] for which in range(25)]
    for turn in range(2000):
        yield talks[turn % len(talks)]


if __name__ == "__main__":
    sys.exit(main())
