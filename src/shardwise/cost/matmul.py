"""Seconds of a matmul by its shape: tiles dealt out in waves, or bytes, whichever takes longer."""

import numpy as np

from shardwise.cluster.device import Device
from shardwise.cost.constants import Constants
from shardwise.cost.numbers import Floats, Number, ceil_divide

# Tiles that libraries choose from, and the share of the best tile's rate that each reaches: a smaller tile reads more
# for each product. 128 x 256 is the usual one (facts 3.3).
_TILES = np.array([(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6)])
_HEIGHTS, _WIDTHS, _REACHED = (column[:, None] for column in _TILES.T)


def matmul_seconds(
    device: Device,
    rate: float,
    m: Number,
    k: Number,
    n: Number,
    *,
    constants: Constants,
    count: Number = 1,
    width: float = 2.0,
) -> Floats:
    """Seconds of `count` products of m x k by k x n at `rate` FLOP/s when every unit has a full tile.

    A product whose tiles do not fill the last wave waits for it: `waves x tile`, not `tiles x tile / units`. The best
    of several tiles is taken, as libraries do.
    """
    m, k, n, count = (np.asarray(each, dtype=np.float64) for each in (m, k, n, count))
    tiles = ceil_divide(m.ravel(), _HEIGHTS) * ceil_divide(n.ravel(), _WIDTHS) * count.ravel()
    waves = ceil_divide(tiles, device.num_units)
    unit = rate / device.num_units * _REACHED
    best: Floats = (waves * (2 * _HEIGHTS * _WIDTHS / unit) * (k.ravel() + constants.tile_ramp)).min(axis=0)
    moved: Floats = count * (m * k + k * n + m * n) * width
    return np.maximum(
        best.reshape(np.broadcast_shapes(m.shape, k.shape, n.shape, count.shape)),
        moved / (device.memory_bytes_per_second * constants.streaming),
    )
