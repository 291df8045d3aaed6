"""Attention masks (causal, window, documents, padding), and the positions of tokens in their documents."""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionMask(NamedTuple):
    """The attention mask of the layers of one kind.

    Attention on one device needs only `dense`. Attention over a part of the sequence (context parallelism) makes its
    own mask from the other fields.
    """

    #: [batch or 1, 1, queries, keys], True where visible. None: plain causal attention.
    dense: Tensor | None
    #: [batch or 1, queries].
    positions: Tensor
    #: [batch, queries], if several documents are packed into one sequence.
    documents: Tensor | None
    window: int | None
    #: [sequences + 1], int32: the start of each sequence in the flattened batch, and the total number of tokens. Then
    #: `dense` is None: the kernel takes packed sequences of any length.
    starts: Tensor | None = None


def find_starts(shape: torch.Size, device: torch.device, documents: Tensor | None) -> Tensor:
    """Return where sequences start in flattened [batch, tokens]: rows, or the documents in them, numbered.

    The number of documents is read from the device once, here, rather than in every layer.
    """
    batch, num_tokens = shape
    if documents is None:
        return torch.arange(0, batch * num_tokens + 1, max(num_tokens, 1), device=device, dtype=torch.int32)
    begins = _starts(documents).flatten().nonzero()[:, 0]
    return torch.cat((begins, begins.new_full((1,), batch * num_tokens))).to(torch.int32)


def number_documents(documents: Tensor) -> Tensor:
    """Number runs of equal ids from 0 in each sequence: an id that returns later is another document."""
    return _starts(documents).cumsum(1) - 1


def positions_in(documents: Tensor) -> Tensor:
    """Return positions that start at 0 in each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - torch.where(_starts(documents), index, 0).cummax(1).values


def causal_mask(
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor | None:
    """Return the mask of queries that are the last of the keys; None if plain causal attention suffices.

    `attention_mask` is [batch, keys], 0 for padding.
    """
    sees_all = num_queries in (1, num_keys) and (window is None or window >= num_keys)
    if sees_all and documents is None and attention_mask is None:
        return None
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    seen = (keys <= queries)[None]
    if window is not None:
        seen = seen & (queries - keys < window)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, :].bool()
    return seen[:, None]


def _starts(documents: Tensor) -> Tensor:
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat((first, documents[:, 1:] != documents[:, :-1]), dim=1)
