"""The next tokens of many rows: drawn by kernels as by the definition."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.sampling import gumbel, make_key, sample

#: Temperature, top-k, top-p and min-p of a row.
MANNERS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.6, 5, 1.0, 0.0), (1.3, 0, 0.5, 0.0), (0.9, 0, 1.0, 0.2),
    (1.0, 7, 0.8, 0.05), (0.8, 1, 0.9, 0.0), (0.0, 3, 0.5, 0.5), (2.0, 10_000, 0.999, 0.0),
]  # fmt: skip


def given(num_words: int, dtype: torch.dtype, scale: float = 3.0) -> list[Tensor]:
    rows = torch.tensor(MANNERS)
    keys = torch.tensor([make_key(seed) for seed in range(len(rows))])
    logits = (torch.randn(len(rows), num_words + 3) * scale).to(dtype)[:, :-3]
    positions = torch.arange(len(rows)) * 1000
    return [logits, rows[:, 0], rows[:, 1].long(), rows[:, 2], rows[:, 3], keys, positions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)])
@pytest.mark.parametrize("num_words", [1, 97, pytest.param(9001, marks=pytest.mark.whole)])
def test_tokens_and_log_probabilities_are_those_of_the_definition(num_words: int, dtype: torch.dtype) -> None:
    for scale in (3.0, 0.1) if num_words == 97 else (3.0,):
        rows = given(num_words, dtype, scale)
        tokens, logprobs = sample(*rows)
        wanted, wanted_logprobs = sample(*rows, kernels=False)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(logprobs, wanted_logprobs, atol=1e-4, rtol=1e-4)


def test_rows_without_cuts_and_keys_in_32_bits() -> None:
    logits, temperature, top_k, top_p, min_p, keys, positions = given(500, torch.float32)
    plain = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p)
    short = keys.to(torch.int32)
    wanted = sample(logits, temperature, *plain, keys, positions, kernels=False)[0]
    for kernels in (True, False):
        made = sample(logits, temperature, *plain, short, positions.int(), has_cuts=False, kernels=kernels)[0]
        assert torch.equal(made, wanted)


def test_words_that_are_equally_likely_go_or_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(16, -1)
    ones, keys = torch.ones(16), torch.tensor([make_key(1)] * 16)
    rows = logits, ones, ones.long() * 2, ones, ones * 0, keys, torch.arange(16)
    tokens = sample(*rows)[0]
    assert torch.equal(tokens, sample(*rows, kernels=False)[0])
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_no_noise_is_beyond_every_logit() -> None:
    keys = torch.tensor([make_key(seed) for seed in range(40)])
    noise = gumbel(keys, torch.arange(40), 200_000)
    assert noise.max() < 23
    assert not noise.isnan().any()
