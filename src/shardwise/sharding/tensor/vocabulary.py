"""The vocabulary shared out: each rank embeds and scores its own words.

A vocabulary that the ranks do not divide is padded with zeros at its end. No token is ever a padding word, and the loss
leaves them out, so their gradient is zero and they stay what they are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwise.ranks.collectives import Group, sum_over
from shardwise.sharding.tensor.columns import ColumnParallelLinear
from shardwise.sharding.tensor.logits import VocabParallelLogits
from shardwise.sharding.wrap_forward import wrap_forward


class VocabularyHead(ColumnParallelLinear):
    """This rank's words of the layer that scores words. What it returns looks like the scores of all words."""

    words: int = 0

    def forward(self, tensor: Tensor) -> Tensor:
        local = super().forward(tensor)
        return VocabParallelLogits.of(local, self.together.group, self.words)


def share_embedding(module: nn.Embedding, group: Group, words: int) -> None:
    """Let an embedding, whose weight is this rank's words already, give the vectors of all words."""
    size = -(-words // group.size)
    first, last = group.rank * size, min((group.rank + 1) * size, words)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - first if first <= module.padding_idx < last else None
    module.num_embeddings = size

    def around(call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        is_elsewhere = (ids < first) | (ids >= last)
        vectors = call((ids - first).masked_fill(is_elsewhere, 0))
        return sum_over(vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0), group, in_place=True)

    wrap_forward(module, around)
