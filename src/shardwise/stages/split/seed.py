"""Torch's generators, seeded many times over for runs that are tried, and Python's and NumPy's beside them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.stages.split.python_draws import python_draws, seed_python, set_python_draws, told_of_draws


def seed_torch(number: int) -> None:
    """Seed torch's generators of all devices in use.

    `torch.manual_seed` also leaves a call for each kind of device that is not in use, with the text of the whole stack:
    some milliseconds each time, of which a trial needs hundreds. And a GPU that came into use later would start from a
    number of ours.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


class Steady:
    """The same random numbers for a unit whoever runs it, and for what comes behind it.

    Torch's are drawn anew by the number of the call. Those of Python and NumPy go on as they would in this process: a
    unit draws its own, and if it does, what is drawn behind it is something else too.
    """

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """One call of a unit."""
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
        """A run, or a loss."""
        seed_torch(0)
        yield
