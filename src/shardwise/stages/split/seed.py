"""Seed the generators of torch, Python and NumPy for trial runs, which need many seeds."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.stages.split.python_draws import python_draws, seed_python, set_python_draws, told_of_draws


def seed_torch(number: int) -> None:
    """Seed torch's generators of all devices in use.

    `torch.manual_seed` also queues a call for each kind of device not in use, with a formatted stack trace. That takes
    some milliseconds, and a trial needs hundreds of seeds. A GPU initialised later would start from a trial's seed.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


@contextmanager
def seeded_alike() -> Iterator[None]:
    """Begin with the same random numbers on every rank, and restore all generators at exit."""
    before = python_draws()
    # All that `seed_torch` seeds: one process may have layers on several GPUs.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        seed_torch(0)
        seed_python(0)
        try:
            yield
        finally:
            set_python_draws(before)


class Steady:
    """Give a unit, and the code after it, the same random numbers on whichever stage runs it.

    Torch's generators are seeded by the index of the call. Those of Python and NumPy are seeded for the unit, and
    continue after it as in this process. If the unit has drawn from them, the code after it draws other numbers, as it
    would without a split.
    """

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """Seed for one call of a unit."""
        before = python_draws()
        seed_torch(2 * call + 1)
        seed_python(2 * call + 1)
        seeded = told_of_draws()
        try:
            yield
        finally:
            have_drawn = told_of_draws() != seeded
            set_python_draws(before)
            if have_drawn:
                random.seed(random.random())
            seed_torch(2 * call + 2)

    @staticmethod
    @contextmanager
    def start() -> Iterator[None]:
        """Seed for a run, or for a loss."""
        seed_torch(0)
        yield
