"""Types of numbers: one value for all candidates, or an array with one for each."""

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
#: The argument of a formula in `cost/`: a number, or an array with one for each candidate.
Number: TypeAlias = "float | int | Floats | Ints"
_Arrays = TypeVar("_Arrays", bound="tuple[Any, ...]")


def choose(chosen: np.ndarray, one: _Arrays, other: _Arrays) -> _Arrays:
    """Return, for each candidate, the values of `one` if it is chosen, else those of `other`."""
    return type(one)(*(np.where(chosen, mine, theirs) for mine, theirs in zip(one, other, strict=True)))


def ceil_divide(amount: Number, parts: Number) -> Floats:
    """Divide and round up: the largest part if an amount of whole items is divided."""
    return np.ceil(np.asarray(amount, dtype=np.float64) / parts)
