"""Numbers that may be one for all candidates, or an array with one for each."""

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
#: What a formula of `cost/` takes: a number, or an array with one for each candidate.
Number: TypeAlias = "float | int | Floats | Ints"
_Arrays = TypeVar("_Arrays", bound="tuple[Any, ...]")


def choose(chosen: np.ndarray, one: _Arrays, other: _Arrays) -> _Arrays:
    """Of each candidate the arrays of one tuple, where it is chosen, else those of the other."""
    return type(one)(*(np.where(chosen, mine, theirs) for mine, theirs in zip(one, other, strict=True)))


def ceil_divide(amount: Number, parts: Number) -> Floats:
    """The largest part of an amount in whole pieces."""
    return np.ceil(np.asarray(amount, dtype=np.float64) / parts)
