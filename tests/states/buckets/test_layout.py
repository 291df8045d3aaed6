"""How parameters lie in a bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.ranks.mesh import make_replicas
from shardwise.states.buckets.flat_layout import FlatLayout

shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(torch.Size), min_size=1, max_size=8)


@given(shapes, st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_number_is_kept_by_exactly_one_rank(found: list[torch.Size], num_ranks: int, dtype: torch.dtype) -> None:
    layout = FlatLayout.of([(f"p{number}", shape) for number, shape in enumerate(found)], dtype, num_ranks)
    kept: dict[str, list[int]] = {slot.name: [] for slot in layout.slots}
    for rank in range(num_ranks):
        for span in layout.spans(rank):
            assert rank * layout.shard_length + span.at == span.slot.start + span.start
            kept[span.slot.name] += range(span.start, span.stop)
    assert kept == {slot.name: list(range(slot.shape.numel())) for slot in layout.slots}


@given(shapes, st.integers(1, 7))
def test_parameters_begin_at_16_bytes_and_the_padding_is_small(found: list[torch.Size], num_ranks: int) -> None:
    layout = FlatLayout.of([(f"p{number}", shape) for number, shape in enumerate(found)], torch.bfloat16, num_ranks)
    assert all(slot.start % 8 == 0 for slot in layout.slots)
    assert layout.length - sum(slot.shape.numel() for slot in layout.slots) < 8 * len(found) + num_ranks


def test_replicas_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="6 replicas cannot be sharded in groups of 4") as error:
        make_replicas(range(6), shard_size=4)
    assert error.value.remedy == "groups of 3"
