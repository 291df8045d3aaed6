"""Sample the next token of each sequence from its logits, and compute log-probabilities.

In this order: penalties, bias, tokens that are excluded now (by a guide, and ends before `min_tokens`); temperature,
top-k, top-p, min-p, and the draw (`kernels/sampling.py`). Log-probabilities are of the model's unmodified logits.
"""

from collections.abc import Collection
from collections.abc import Sequence as Several
from functools import partial

import torch
from torch import Tensor

from shardwise.kernels.sampling import make_key, sample_plain
from shardwise.serving.request import Logprob
from shardwise.serving.sequence import Sequence


def draw(logits: Tensor, sequences: Several[Sequence], eos: Collection[int] = ()) -> Tensor:
    """Sample the next tokens, [sequences], from logits, [sequences, vocabulary]."""
    numbers = logits.float()
    if any(_is_adjusted(each, eos) for each in sequences):
        numbers = numbers.clone()
        for row, sequence in zip(numbers, sequences, strict=True):
            _adjust(row, sequence, eos)
    samplings = [each.request.sampling for each in sequences]
    if all(sampling.temperature == 0 for sampling in samplings):
        return numbers.argmax(-1)
    tensor = partial(torch.tensor, device=logits.device)
    return sample_plain(
        numbers,
        tensor([sampling.temperature for sampling in samplings]),
        tensor([sampling.top_k for sampling in samplings]),
        tensor([sampling.top_p for sampling in samplings]),
        tensor([sampling.min_p for sampling in samplings]),
        tensor([make_key(each.seed) for each in sequences]),
        tensor([len(each.tokens) for each in sequences]),
    )


def tell_logprobs(logits: Tensor, tokens: Several[int], num_likeliest: int) -> list[Logprob]:
    """Return the log-probability of each row's token, and of the most likely ones beside it."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_likeliest, logprobs.shape[1]), dim=-1)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        Logprob(token=token, logprob=logprob, top=tuple(zip(*each, strict=True)))
        for token, logprob, each in zip(tokens, own, likeliest, strict=True)
    ]


def ends_of(sequence: Sequence, eos: Collection[int]) -> set[int]:
    """Return the tokens that end a sequence."""
    sampling = sequence.request.sampling
    return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))


def _is_adjusted(sequence: Sequence, eos: Collection[int]) -> bool:
    sampling = sequence.request.sampling
    has_penalty = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    is_early = sequence.num_generated < sampling.min_tokens and bool(ends_of(sequence, eos))
    return bool(has_penalty or sampling.logit_bias or sampling.guide is not None or is_early)


def _adjust(row: Tensor, sequence: Sequence, eos: Collection[int]) -> None:
    """Apply penalties, bias and exclusions to a row of logits in place."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        # As in transformers (Keskar et al. 2019, section 4.1): make it less likely, whatever the logit's sign.
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_generated:
        counts = torch.bincount(torch.tensor(sequence.generated, device=row.device), minlength=len(row))
        row -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if sampling.guide is not None:
        allowed = torch.as_tensor(sampling.guide.allowed(), dtype=torch.bool, device=row.device)[: len(row)]
        row[: len(allowed)].masked_fill_(~allowed, -torch.inf)
        row[len(allowed) :] = -torch.inf
        sequence.is_stuck = not bool((row > -torch.inf).any())
    if sequence.num_generated < sampling.min_tokens:
        longer = row.clone()
        longer[list(ends_of(sequence, eos))] = -torch.inf
        # If the guide allows nothing but an end, the text cannot be longer.
        if sampling.guide is None or (longer > -torch.inf).any():
            row.copy_(longer)
