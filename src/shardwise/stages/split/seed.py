"""The generators of torch, Python and NumPy: seeded many times over for runs that are tried, noted, and put back."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_torch(number: int) -> None:
    """Seed torch's generators of all devices in use.

    `torch.manual_seed` also leaves a call for each kind of device that is not in use, with the text of the whole stack:
    some milliseconds each time, of which a trial needs hundreds. And a GPU that came into use later would start from a
    number of ours.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


class Steady:
    """The same random numbers for a unit whoever runs it, and for what comes behind it.

    Torch's are drawn anew by the number of the call. Those of Python and NumPy go on as they would in this process: a
    unit draws its own, and if it does, what is drawn behind it is something else too.
    """

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """One call of a unit."""
        before = python_draws()
        _seed(2 * call + 1)
        seeded = told_of(python_draws())
        try:
            yield
        finally:
            have_drawn = told_of(python_draws()) != seeded
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


def _seed(number: int) -> None:
    seed_torch(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def python_draws() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators."""
    return random.getstate(), _numpy_state()


def set_python_draws(states: tuple[Any, Any]) -> None:
    """Have them go on from there."""
    random.setstate(states[0])
    _set_numpy_state(states[1])


def told_of(states: tuple[Any, Any]) -> tuple[Any, ...]:
    """The same for the same states."""
    own, drawn = states
    return own, None if drawn is None else (drawn[1].tobytes(), drawn[2])


def draws_digest() -> bytes:
    """The state of Python's and NumPy's generators, in a few bytes."""
    return hashlib.blake2b(repr(told_of(python_draws())).encode(), digest_size=16).digest()
