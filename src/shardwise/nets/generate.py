"""Autoregressive generation: each next token is the most likely, or one that the caller draws."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.nets.cache import Cache
from shardwise.nets.transformer import Output, Transformer


def likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Transformer, input_ids: Tensor, num_tokens: int, choose: Callable[[Tensor], Tensor] = likeliest
) -> Tensor:
    """Return prompts, [batch, tokens], with `num_tokens` more of each. Prompts are equally long.

    `choose` gives tokens, [batch, 1], for logits, [batch, vocabulary].
    """
    cache, new = Cache(), input_ids
    for _ in range(num_tokens):
        output = model(new, cache=cache)
        logits = output.logits if isinstance(output, Output) else output
        new = choose(logits[:, -1])
        input_ids = torch.cat((input_ids, new), dim=1)
    return input_ids
