"""The states of Python's and NumPy's generators of random numbers: noted, compared and put back.

A run that leaves no trace asks for them twice, and a trial has dozens of runs. NumPy tells the state of its generator,
and takes one, word by word in 60 us. Its memory is compared in less than one; so only what was drawn from is set again.
"""

import ctypes
import hashlib
import random
import sys
from typing import Any, NamedTuple

#: What NumPy's generator has in its memory: 624 words, and where among them it is.
_NUM_BYTES = 624 * 4 + 4


class PythonDraws(NamedTuple):
    """Where both generators were: of NumPy's, what tells that it was drawn from, and its whole state."""

    own: Any
    told: bytes | None
    whole: Any

    @property
    def are_here(self) -> bool:
        """Whether they are there still."""
        return told_of_draws() == (self.own, self.told)


def python_draws() -> PythonDraws:
    """Where they are now."""
    numpy = sys.modules.get("numpy")
    return PythonDraws(
        random.getstate(), told_of_numpy(), None if numpy is None else numpy.random.get_state(legacy=False)
    )


def set_python_draws(states: PythonDraws) -> None:
    """Have them go on from there."""
    random.setstate(states.own)
    # NumPy makes normal numbers two at a time. That the second was drawn is not seen in the generator's memory.
    if states.whole is not None and (states.whole["has_gauss"] or told_of_numpy() != states.told):
        sys.modules["numpy"].random.set_state(states.whole)


def seed_python(number: int) -> None:
    """Have them begin anew."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def told_of_draws() -> tuple[Any, bytes | None]:
    """The same as long as nothing is drawn from them."""
    return random.getstate(), told_of_numpy()


def draws_digest() -> bytes:
    """The same, in a few bytes."""
    return hashlib.blake2b(repr(told_of_draws()).encode(), digest_size=16).digest()


def told_of_numpy() -> bytes | None:
    """What NumPy's generator has in its memory."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    bits = numpy.random.get_bit_generator()
    if type(bits).__name__ == "MT19937":
        return ctypes.string_at(bits.ctypes.state_address, _NUM_BYTES)
    return repr(numpy.random.get_state(legacy=False)).encode()  # Somebody has put another kind there.
