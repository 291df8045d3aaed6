import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.units import (
    format_bytes,
    format_flops,
    format_number,
    format_percent,
    format_seconds,
    parse_bytes,
    parse_seconds,
    round_significant,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512 B", 512),
        ("1KiB", 1024),
        ("1 kB", 1000),
        ("1 KB", 1000),
        ("78.9 GiB", 84718229914),
        ("80GB", 80 * 10**9),
        ("1.5e3 MiB", 1572864000),
        (" .5 TiB ", 2**39),
        ("+1 PiB", 2**50),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1.5ms", 1.5e-3), ("20 us", 20e-6), ("20 µs", 20e-6), ("20 \u03bcs", 20e-6), ("7 ns", 7e-9), ("2 min", 120.0),
     ("1.5h", 5400.0), ("1 d", 86400.0), ("3", 3.0), ("1e-3", 1e-3)],
)  # fmt: skip
def test_times_are_read_in_units_from_nanoseconds_to_days(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lots", "'lots' is not a size in bytes\n  try: 78.9 GiB"),
        ("", "'' is not a size in bytes\n  try: 78.9 GiB"),
        ("nan", "'nan' is not a size in bytes\n  try: 78.9 GiB"),
        ("1 2 GB", "'1 2 GB' is not a size in bytes\n  try: 78.9 GiB"),
        ("-4 GiB", "'-4 GiB' is not a size in bytes: it is negative\n  try: 4 GiB"),
        ("1e999", "'1e999' is not a size in bytes: it is too large\n  try: 78.9 GiB"),
        (
            "80 Gb",
            "'80 Gb' is not a size in bytes: unknown unit 'Gb'; "
            "known: B, KiB, MiB, GiB, TiB, PiB, KB, kB, MB, GB, TB, PB\n  try: 80 GB",
        ),
    ],
)
def test_a_size_that_cannot_be_read_is_told_with_what_to_type(text: str, message: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        parse_bytes(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "'soon' is not a time\n  try: 1.5 ms"),
        ("-1", "'-1' is not a time: it is negative\n  try: 1"),
        (
            "3 fortnights",
            "'3 fortnights' is not a time: unknown unit 'fortnights'; "
            "known: ns, us, µs, ms, s, min, h, d\n  try: 1.5 ms",
        ),
    ],
)
def test_a_time_that_cannot_be_read_is_told_with_what_to_type(text: str, message: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        parse_seconds(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("num_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1023, "1023 B", "1.0 kB"),
        (1024, "1.0 KiB", "1.0 kB"),
        (2**20 - 1, "1.0 MiB", "1.0 MB"),
        (84718229914, "78.9 GiB", "84.7 GB"),
        (-38 * 2**30, "-38.0 GiB", "-40.8 GB"),
        (2**60, "1024.0 PiB", "1152.9 PB"),
    ],
)
def test_sizes_are_printed_with_one_decimal(num_bytes: int, binary: str, decimal: str) -> None:
    assert (format_bytes(num_bytes), format_bytes(num_bytes, decimal=True)) == (binary, decimal)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.5e-3, "1.5 ms"), (0.99996, "1 s"), (83.19, "83.2 s"), (119.9, "2 min"), (8100.0, "2.25 h"),
     (200000.0, "2.31 d"), (4.2e-9, "4.2 ns"), (1e-6, "1 µs"), (-0.25, "-250 ms"), (1e-12, "0.001 ns")],
)  # fmt: skip
def test_times_are_printed_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_flops_are_work_or_speed() -> None:
    assert format_flops(3.12e14) == "312 TFLOP"
    assert format_flops(999.9e12) == "1 PFLOP"
    assert format_flops(0.0) == "0 FLOP"


def test_percents_of_a_column_line_up() -> None:
    assert [format_percent(fraction) for fraction in (0.067, 0.28, 1.0, -0.0)] == [
        "6.7 %",
        "28.0 %",
        "100.0 %",
        "0.0 %",
    ]
    assert format_percent(0.28, decimals=0) == "28 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [(25.500000000000004, "25.5"), (0.1 + 0.2, "0.3"), (8.0, "8"), (8, "8"), (10**30, str(10**30)), (-0.0, "0"),
     (1e300, "1e+300"), (1234567.0, "1234567"), (1e-7, "1e-07"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_are_printed_without_the_dust_of_float_sums(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.integers(min_value=0, max_value=2**60), st.booleans())
def test_a_printed_size_reads_back_to_what_its_decimal_can_tell(num_bytes: int, decimal: bool) -> None:
    text = format_bytes(num_bytes, decimal=decimal)
    unit = parse_bytes("1 " + text.split()[1])
    assert abs(parse_bytes(text) - num_bytes) <= 0.0501 * unit


@given(st.integers(min_value=0, max_value=10**30))
def test_a_bare_number_of_bytes_reads_back_exactly(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes} B") == num_bytes


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_a_printed_time_reads_back_to_three_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=1.1e-2)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_printed_number_reads_back_to_twelve_digits(value: float) -> None:
    assert float(format_number(value)) == round_significant(value) == pytest.approx(value, rel=1e-11)
