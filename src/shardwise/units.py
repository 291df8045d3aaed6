"""Bytes, seconds and FLOPs: parse what a person types, print what a person reads.

Inside Shardwise a size is an `int` of bytes and a time a `float` of seconds; units exist only at the edge, and that is
here.
"""

import math
import re
from collections.abc import Mapping

from shardwise.errors import ShardwiseError, nearest

_BINARY_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES = {**_BINARY_BYTES, "KB": 10**3, **_DECIMAL_BYTES}

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# The least time printed in each unit. 83 s is easier to compare than 1.38 min, so the long units start at two.
_SECONDS_FROM = {"ns": 0.0, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 120.0, "h": 7200.0, "d": 172800.0}

_FLOPS = {"FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18}

_QUANTITY = re.compile(r"(?P<sign>[-+]?)(?P<number>(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)\s*(?P<unit>[a-zµ]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return bytes from `80 GB`, `78.9GiB` or a bare number. Case matters: `Gb` is refused, as it may mean bits."""
    return round(_parse(text, _BYTES, what="a size in bytes", example="78.9 GiB"))


def parse_seconds(text: str) -> float:
    """Return seconds from `1.5ms`, `20 us`, `2 min` or a bare number."""
    text = text.replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}")  # Keyboards differ; the two look alike.
    return _parse(text, _SECONDS, what="a time", example="1.5 ms")


def format_bytes(num_bytes: float, *, decimal: bool = False) -> str:
    """Return `78.9 GiB`, or `84.7 GB` if `decimal`: memory is sold in the first, disks and links in the second."""
    units = _DECIMAL_BYTES if decimal else _BINARY_BYTES
    # What would round to 1024.0 of one unit is 1.0 of the next.
    fitting = [unit for unit, size in units.items() if abs(num_bytes) >= 0.99995 * size]
    unit = fitting[-1] if fitting else "B"
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes / units[unit]:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return `1.5 ms`, `83.2 s`, `2.25 h`: three significant digits."""
    seconds = round_significant(seconds, 3)
    if seconds == 0.0:
        return "0 s"
    unit = [unit for unit, start in _SECONDS_FROM.items() if abs(seconds) >= start][-1]
    return f"{format_number(seconds / _SECONDS[unit], 3)} {unit}"


def format_flops(flops: float) -> str:
    """Return `312 TFLOP` of work: three significant digits."""
    flops = round_significant(flops, 3)
    fitting = [unit for unit, size in _FLOPS.items() if abs(flops) >= size]
    unit = fitting[-1] if fitting else "FLOP"
    return f"{format_number(flops / _FLOPS[unit], 3)} {unit}"


def format_percent(fraction: float, *, decimals: int = 1) -> str:
    """Return `6.7 %` from 0.067. The number of decimals is fixed, so that a column of them lines up."""
    return f"{fraction * 100 + 0.0:.{decimals}f} %"


def format_number(value: float, significant: int = 12) -> str:
    """Return the shortest text of a number after rounding: 25.5, not 25.500000000000004, and 8, not 8.0."""
    if isinstance(value, int):
        return str(value)
    rounded = round_significant(value, significant)
    # Python writes whole floats out in full below 1e16, as a person would.
    return str(int(rounded)) if rounded.is_integer() and abs(rounded) < 1e16 else repr(rounded)


def counted(number: int, noun: str) -> str:
    """Return `1 stage`, `4 stages`, `8 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def round_significant(value: float, significant: int = 12) -> float:
    """Return `value` without its last digits, where sums of floats leave rounding errors. Never -0.0."""
    return float(f"{value:.{significant}g}") + 0.0


def _parse(text: str, units: Mapping[str, float], *, what: str, example: str) -> float:
    """Return the number in `text` times its unit's size; a bare number is in the unit of size 1."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ShardwiseError(f"{text!r} is not {what}", remedy=example)
    sign, number, unit = match["sign"], match["number"], match["unit"]
    if unit and unit not in units:
        meant = nearest(unit, units)
        problem = f"{text!r} is not {what}: unknown unit {unit!r}; known: {', '.join(units)}"
        raise ShardwiseError(problem, remedy=f"{number} {meant}" if meant else example)
    size = units[unit] if unit else 1
    value = float(number) * size
    if sign == "-" and value > 0.0:
        raise ShardwiseError(f"{text!r} is not {what}: it is negative", remedy=f"{number} {unit}".strip())
    if not math.isfinite(value):
        raise ShardwiseError(f"{text!r} is not {what}: it is too large", remedy=example)
    # Whole numbers stay exact: a float would lose bytes above 2**53.
    return int(number) * size if number.isdecimal() else value
