"""Numbers that may be one for all candidates, or an array with one for each."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
#: What a formula of `cost/` takes: a number, or an array with one for each candidate.
Number: TypeAlias = "float | int | Floats | Ints"


def ceil_divide(amount: Number, parts: Number) -> Floats:
    """The largest part of an amount in whole pieces."""
    return np.ceil(np.asarray(amount, dtype=np.float64) / parts)
