"""The transformer: an embedding, blocks, a norm and a head, as `settings.py` describes them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.kernels.choose import autocast_type
from shardwise.nets.attention import takes_sequences
from shardwise.nets.block import Block, make_dropout, make_norm
from shardwise.nets.cache import Cache
from shardwise.nets.head import Head
from shardwise.nets.mask import AttentionMask, causal_mask, find_starts, number_documents, positions_in
from shardwise.nets.norm import normed
from shardwise.nets.rotary import Rotary
from shardwise.nets.settings import Heads, Settings


class Output(NamedTuple):
    """The output of a model with a balancing loss: add `auxiliary`, which is already weighted, to the mean loss."""

    logits: Tensor
    auxiliary: Tensor


def _table(num_rows: int, width: int) -> nn.Embedding:
    """Return a table of vectors. On the meta device none are drawn, for which torch would load its compiler (2 s)."""
    if not torch.empty(0).is_meta:
        return nn.Embedding(num_rows, width)
    made: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)  # type: ignore[no-untyped-call]
    return made


class Transformer(nn.Module):
    """A causal language model. Built under `torch.device("meta")` it takes no memory; then `initialise` or `hf.load`
    materialises the parameters that a process needs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.embed = _table(settings.vocabulary, settings.width)
        self.positions = _table(settings.length, settings.width) if settings.rope is None else None
        self.rotary = Rotary(settings.rope, settings.rotated_dim) if settings.rope is not None else None
        self.dropout = make_dropout(settings.dropout.embedding)
        self.layers = nn.ModuleList(Block(settings, layer) for layer in range(settings.num_layers))
        self.norm = make_norm(settings)
        self.kernels = True
        self.head = Head(settings.width, settings.vocabulary)
        if settings.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | Output:
        """Return logits, [batch, tokens, vocabulary].

        `attention_mask` is 0 for padding, over all tokens including those in the cache. `documents` are ids of packed
        documents: tokens see only their own document, and positions start at 0 in each.
        """
        num_before = 0 if cache is None else cache.num_tokens
        self._check(input_ids, documents, num_before)
        if documents is not None:
            documents = number_documents(documents)
        if position_ids is None:
            position_ids = _positions(input_ids, documents, num_before)
        whole, windowed = self._masks(position_ids, documents, attention_mask, num_before)
        rotation = None if self.rotary is None else self.rotary(position_ids)
        hidden = self.embed(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(position_ids)
        hidden = self.dropout(hidden)
        balance = torch.zeros((), device=input_ids.device) if self.settings.has_auxiliary else None
        for layer, block in enumerate(self.layers):
            mask = windowed if self.settings.is_windowed(layer) else whole
            hidden, balance = block(hidden, balance, rotation, mask, cache)
        logits: Tensor = self.head(normed(self.norm, hidden, kernels=self.kernels))
        return logits if balance is None else Output(logits, balance)

    def _masks(
        self, positions: Tensor, documents: Tensor | None, attention_mask: Tensor | None, num_before: int
    ) -> tuple[AttentionMask, AttentionMask]:
        """Return the masks of layers without a window, and of those with one."""
        num_queries = positions.shape[1]
        heads, window = self.settings.attention, self.settings.window
        has_mask = documents is not None or (window is not None and window < num_queries)
        starts = None
        if has_mask and attention_mask is None and not num_before and isinstance(heads, Heads):
            dtype = autocast_type(positions.device) or self.embed.weight.dtype
            if not self.settings.dropout.attention and takes_sequences(positions.device, dtype, heads.head_dim):
                starts = find_starts(positions.shape, positions.device, documents)

        def masked(window: int | None) -> AttentionMask:
            if starts is not None:
                return AttentionMask(None, positions, documents, window, starts)
            dense = causal_mask(
                num_queries,
                num_before + num_queries,
                positions.device,
                window=window,
                documents=documents,
                attention_mask=attention_mask,
            )
            return AttentionMask(dense, positions, documents, window)

        kinds = {self.settings.is_windowed(layer) for layer in range(self.settings.num_layers)}
        windowed = masked(self.settings.window)
        return masked(None) if False in kinds else windowed, windowed

    def _check(self, input_ids: Tensor, documents: Tensor | None, num_before: int) -> None:
        num_tokens = num_before + input_ids.shape[1]
        if self.positions is not None and num_tokens > self.settings.length:
            raise ShardwiseError(
                f"a sequence of {num_tokens} tokens is longer than the {self.settings.length} learned positions",
                remedy=f"sequences of at most {self.settings.length} tokens",
            )
        if documents is not None and num_before:
            raise ShardwiseError(
                f"packed documents cannot continue from a cache of {num_before} tokens", remedy="one sequence a row"
            )


def _positions(input_ids: Tensor, documents: Tensor | None, num_before: int) -> Tensor:
    if documents is not None:
        return positions_in(documents)
    num_tokens = num_before + input_ids.shape[1]
    return torch.arange(num_before, num_tokens, device=input_ids.device).expand(input_ids.shape)
