"""A text that a model writes: tokens drawn by their likelihoods, from a seed."""

import torch

from shardwise.nets.cache import Cache
from shardwise.nets.transformer import Output, Transformer

#: Below 1 the likely are made likelier: a small model's text is more readable so.
_TEMPERATURE = 0.8


@torch.no_grad()
def continued(model: Transformer, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """`num_tokens` tokens that follow a prompt."""
    generator = torch.Generator().manual_seed(seed)
    cache, new, found = Cache(), torch.tensor([prompt]), list[int]()
    for _ in range(num_tokens):
        output = model(new, cache=cache)
        logits = output.logits if isinstance(output, Output) else output
        likelihoods = torch.softmax(logits[0, -1].float() / _TEMPERATURE, dim=0)
        new = torch.multinomial(likelihoods, 1, generator=generator)[None]
        found.append(int(new))
    return found
