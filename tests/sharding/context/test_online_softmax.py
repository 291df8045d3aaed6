"""Results over different keys, merged by the sums of their weights."""

import pytest
import torch

from shardwise.sharding.context.ring import OnlineSoftmax


@pytest.mark.parametrize("largest", [1.0, 300.0, -300.0])
def test_parts_of_any_size_are_merged_to_what_all_keys_give_at_once(largest: float) -> None:
    """The exponential of 300 is more than fp32 holds, and that of -300 is nothing: only differences may be raised."""
    generator = torch.Generator().manual_seed(0)
    query = torch.zeros(2, 3, 5, 4)
    scores = largest + 3 * torch.randn(2, 3, 5, 12, generator=generator)
    values = torch.randn(2, 3, 12, 4, generator=generator)
    joined = OnlineSoftmax(query, 4)
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part = scores[..., keys]
        joined.add(slice(None), part.softmax(-1) @ values[:, :, keys], part.logsumexp(-1))
    out, sums = joined.finish(hides=False)
    # A sum of 300 has 5 digits behind the point in fp32, and weights are as near.
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
