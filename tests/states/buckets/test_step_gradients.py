"""Which parameters had a gradient, by what replicas have said."""

from typing import Any, cast

import torch

from shardwise.states.buckets.step_gradients import _answers


class _Layout:
    slots = ("first", "second", "third")


class _Bucket:
    layout = _Layout()


def test_a_parameter_is_used_if_any_replica_has_used_it() -> None:
    one, other = (cast(Any, _Bucket()) for _ in range(2))
    said = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 0.0])  # How many of two replicas, parameter by parameter.
    assert _answers(said, [one, other]) == {one: [True, False, True], other: [False, True, False]}
