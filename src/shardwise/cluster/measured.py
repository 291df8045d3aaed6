"""Measured all-reduces: time by size over the eight devices of a node (facts 2.4, sizes doubling from 32 KiB).

Formulas with two parameters miss the knee of these curves by 25 to 60 %, so the curves themselves are kept. `_BUS`
tables are bus bandwidths in GB/s: bytes x 2(n-1)/n / seconds.
"""

from collections.abc import Mapping, Sequence

from shardwise.cluster.curve import Curve, bus_factor

_SIZES: tuple[int, ...] = tuple(2**15 * 2**step for step in range(20))
_NUM_DEVICES = 8

_A100_MICROSECONDS = (
    43.8, 46.8, 51.8, 61.4, 80.4, 101.9, 101.4, 101.5, 133.5, 276.6,
    424.0, 684.6, 1327.6, 2420.6, 4218.0, 8204.0, 16240.0, 32136.0, 64074.0, 127997.0,
)  # fmt: skip
_H200_BUS = (
    1.44, 2.93, 5.73, 11.74, 23.9, 39.9, 64.5, 107.0, 156.0, 220.0,
    276.0, 347.0, 402.0, 436.0, 450.0, 464.0, 469.0, 473.0, 477.0, 482.0,
)  # fmt: skip
_B200_BUS = (
    1.20, 2.17, 4.86, 9.54, 18.7, 36.1, 63.1, 76.5, 126.0, 255.0,
    326.0, 401.0, 568.0, 646.0, 689.0, 723.0, 735.0, 741.0, 839.0, 846.0,
)  # fmt: skip

_FACTOR = bus_factor("all-reduce", _NUM_DEVICES)


def _curve(seconds: Sequence[float]) -> Curve:
    return Curve(
        collective="all-reduce", scope="inside", num_devices=_NUM_DEVICES, sizes=_SIZES, seconds=tuple(seconds)
    )


def _of_bus(bus: Sequence[float]) -> Curve:
    return _curve([size * _FACTOR / (rate * 1e9) for size, rate in zip(_SIZES, bus, strict=True)])


#: All-reduces over eight devices, by the name of the link.
CURVES: Mapping[str, Curve] = {
    "nvlink3": _curve([time * 1e-6 for time in _A100_MICROSECONDS]),
    "nvlink4": _of_bus(_H200_BUS),
    "nvlink5": _of_bus(_B200_BUS),
}

#: All-gathers and reduce-scatters cannot use sums in the switch: 361 and 363 GB/s, where an all-reduce has 367 over the
#: ring and 480 in the switch (H200, facts 2.4); on B200, the ring has 682 of 846. As a share of the all-reduce's rate.
RING_SHARE: Mapping[str, float] = {"nvlink3": 1.0, "nvlink4": 362 / 480, "nvlink5": 682 / 846}
