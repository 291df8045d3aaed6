"""What ranks of an engine hold: masters of weights of 16 bits, and no whole weights beyond a forward under zero=3."""

import pytest

from shardwise.ranks.spawn import Ranks
from tests.execution.held import bytes_a_parameter

#: Padding of buckets, of a model this small.
CLOSE = 0.04


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("dp=2,precision=bf16", (2, 2, 12)),
        ("dp=2,zero=1,precision=bf16", (2, 2, 6)),
        ("dp=2,zero=2,precision=bf16", (2, 1, 6)),
    ],
)
def test_weights_of_16_bits_are_trained_on_masters(two: Ranks, plan: str, wanted: tuple[float, ...]) -> None:
    for *found, are_masters in two.run(bytes_a_parameter, plan, True):
        assert found == pytest.approx(wanted, rel=CLOSE)
        assert are_masters


def test_a_pipeline_has_masters_too(two: Ranks) -> None:
    parts = two.run(bytes_a_parameter, "pp=2,microbatches=2,precision=bf16", True)
    assert all(are_masters for *_, are_masters in parts)
    # The embedding is tied, and on both ranks.
    assert sum(each[2] for each in parts) >= 12


def test_parts_of_sequences_leave_no_whole_weights_behind(two: Ranks) -> None:
    for parameters, gradients, optimizer, _ in two.run(bytes_a_parameter, "cp=2,zero=3", False):
        assert (parameters, gradients, optimizer) == pytest.approx((2, 2, 4), rel=CLOSE)
