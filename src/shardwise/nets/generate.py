"""The likeliest next token, again and again."""

import torch
from torch import Tensor

from shardwise.nets.cache import Cache
from shardwise.nets.transformer import Output, Transformer


@torch.no_grad()
def generate(model: Transformer, input_ids: Tensor, num_tokens: int) -> Tensor:
    """Return prompts, [batch, tokens], with `num_tokens` more of each. Prompts are equally long."""
    cache, new = Cache(), input_ids
    for _ in range(num_tokens):
        output = model(new, cache=cache)
        logits = output.logits if isinstance(output, Output) else output
        new = logits[:, -1:].argmax(-1)
        input_ids = torch.cat((input_ids, new), dim=1)
    return input_ids
