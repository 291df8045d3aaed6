"""The order of samples: a permutation of any size, computed from the seed alone, without memory.

A Feistel network makes a permutation of 4**n numbers from a round function that need not be one. Results beyond the
size are permuted again until they are within it (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002,
method 3). The order does not depend on the plan or the number of ranks, so all plans read the same samples. The
thousandth sample is found without the 999 before it, so a run resumes exactly where it stopped.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
# SplitMix64's constants (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ALL_BITS = (1 << 64) - 1

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The samples 0 to `size` - 1, each once an epoch, in a different order in each epoch."""

    size: int
    seed: int

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the `count` samples at positions `first` and on, counted from the beginning of the run."""
        places = np.arange(first, first + count, dtype=np.int64)
        found = np.empty(count, dtype=np.int64)
        for epoch in np.unique(places // self.size):
            here = places // self.size == epoch
            found[here] = self._permuted(places[here] % self.size, int(epoch))
        return found

    def _permuted(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        keys = [_key(self.seed, epoch, number) for number in range(_ROUNDS)]
        numbers = places.astype(np.uint64)
        is_out = np.ones(len(numbers), dtype=bool)
        while is_out.any():
            numbers[is_out] = _feistel(numbers[is_out], keys, half_bits)
            is_out = numbers >= np.uint64(self.size)
        return numbers.astype(np.int64)


def _feistel(numbers: Numbers, keys: list[np.uint64], half_bits: int) -> Numbers:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(numbers: Numbers) -> Numbers:
    """SplitMix64's finalizer; products wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


def _key(seed: int, epoch: int, number: int) -> np.uint64:
    start = (seed * 0x100000001B3 + epoch * 0x1000193 + number + 1) * _STEP & _ALL_BITS
    return np.uint64(_mixed(np.array([start], dtype=np.uint64))[0])
