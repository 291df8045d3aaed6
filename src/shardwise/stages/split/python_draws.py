"""Read, compare and restore the states of the global random generators of Python and NumPy.

A run without side effects reads them twice, and a trial has dozens of runs. NumPy reads and sets the state of its
generator word by word, in 60 us. Comparing its memory takes less than 1 us, so only a generator that was drawn from is
set again.
"""

import ctypes
import hashlib
import random
import sys
from typing import Any, NamedTuple

#: The memory of NumPy's Mersenne Twister: 624 words, and the position among them.
_NUM_BYTES = 624 * 4 + 4


class PythonDraws(NamedTuple):
    """The states of both generators. `told` is NumPy's memory, which shows draws; `whole` is its full state."""

    own: Any
    told: bytes | None
    whole: Any

    @property
    def are_here(self) -> bool:
        """Whether nothing was drawn since."""
        return told_of_draws() == (self.own, self.told)


def python_draws() -> PythonDraws:
    """Return the current states."""
    numpy = sys.modules.get("numpy")
    return PythonDraws(
        random.getstate(), told_of_numpy(), None if numpy is None else numpy.random.get_state(legacy=False)
    )


def set_python_draws(states: PythonDraws) -> None:
    """Restore the states."""
    random.setstate(states.own)
    # NumPy makes normal numbers in pairs. Drawing the second of a pair does not change the generator's memory.
    if states.whole is not None and (states.whole["has_gauss"] or told_of_numpy() != states.told):
        sys.modules["numpy"].random.set_state(states.whole)


def seed_python(number: int) -> None:
    """Seed both generators."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def told_of_draws() -> tuple[Any, bytes | None]:
    """Return a value that is equal as long as nothing is drawn from either."""
    return random.getstate(), told_of_numpy()


def draws_digest() -> bytes:
    """Return a digest of `told_of_draws`."""
    return hashlib.blake2b(repr(told_of_draws()).encode(), digest_size=16).digest()


def told_of_numpy() -> bytes | None:
    """Return the memory of NumPy's generator."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    bits = numpy.random.get_bit_generator()
    if type(bits).__name__ == "MT19937":
        return ctypes.string_at(bits.ctypes.state_address, _NUM_BYTES)
    return repr(numpy.random.get_state(legacy=False)).encode()  # Another bit generator was set.
