"""Shard a batch along its sequences: this rank's pieces of every entry with one value per token.

    batch                                  rank 0 of 2 (pieces 0 and 3)
    input_ids      a b c d e f g           a b g +                      + is a token added to make 8, which 4 divides
    labels         b c d e f g h           b c h -                      - is -100: it is left out of the loss
    position_ids   (none)                  0 1 6 0                      where tokens stand in the whole sequence

Labels are aligned with their tokens. If the label of a token is the next token, the shift is made before the cut
(`shift_labels`): afterwards the next token may be on another rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import filled
from shardwise.sharding.context.mask import Tokens, number_documents, positions_in
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.rows import nodes
from shardwise.stages.stage import Batch

#: The label of tokens that are excluded from the loss.
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The token dim of an entry, its value for padding tokens, and whether that value excludes them from the loss."""

    dim: int = 1
    fill: float = 0
    ignores: bool = False


#: The known entry names.
ENTRIES: Mapping[str, Entry] = {
    "input_ids": Entry(),
    "inputs_embeds": Entry(),
    "position_ids": Entry(dim=-1),
    "attention_mask": Entry(),
    "token_type_ids": Entry(),
    "documents": Entry(fill=-1),
    "labels": Entry(fill=IGNORED, ignores=True),
    "shift_labels": Entry(fill=IGNORED, ignores=True),
    "loss_mask": Entry(ignores=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSharding:
    """How batches of a module are cut.

    `entries` adds to the known names: the entry, its dim, or None if every rank gets it whole. `positions` is the
    module's argument for positions, None if it has none. `packs`: positions that restart begin another document.
    `drops` are entries that only attention uses and the module does not take. `predicts`: no loss is computed, so
    padding tokens need not be excluded from it.
    """

    entries: Mapping[str, Entry | int | None] = field(default_factory=dict)
    positions: str | None = "position_ids"
    packs: bool = False
    pads: bool = True
    predicts: bool = False
    drops: frozenset[str] = frozenset()


class LocalBatch(dict[str, Any]):
    """This rank's part of a batch, with the facts about all of its tokens."""

    def __init__(self, entries: Mapping[str, Any], tokens: Tokens) -> None:
        super().__init__(entries)
        self.tokens = tokens


def shift_labels(input_ids: Tensor) -> Tensor:
    """Return the label of every token: the next token. The last has none (`IGNORED`)."""
    return torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=IGNORED)


def shard_sequence(batch: Batch, *, rank: int, num_ranks: int, sharding: SequenceSharding | None = None) -> LocalBatch:
    """Return a rank's part of a batch that all ranks of the group have whole."""
    how = sharding or SequenceSharding()
    entries = _entries_of(batch, how)
    length = _length_of(batch, entries)
    num_added = _num_added(length, num_ranks, entries, how)
    whole = dict(batch)
    documents = _documents(batch, how)
    if how.positions is not None and how.positions not in batch:
        whole[how.positions] = _positions(batch, entries, documents, length)
        entries[how.positions] = ENTRIES["position_ids"]
    for name, entry in entries.items():
        whole[name] = filled(whole[name], entry.dim, length + num_added, entry.fill)
    tokens = Tokens(
        num_ranks=num_ranks,
        length=length + num_added,
        num_real=length,
        documents=None if documents is None else filled(documents, 1, length + num_added, length),
        hidden=_hidden(whole.get("attention_mask")),
    )
    for name, entry in entries.items():
        whole[name] = zigzag_shard(whole[name], entry.dim, rank, num_ranks)
    return LocalBatch({name: each for name, each in whole.items() if name not in how.drops}, tokens)


def first_tokens(batch: Batch, num_tokens: int, num_pieces: int, sharding: SequenceSharding) -> Batch:
    """Return the first tokens of all sequences: the largest multiple of `num_pieces` in `num_tokens`, at least one."""
    entries = _entries_of(batch, sharding)
    length = _length_of(batch, entries)
    kept = max(min(num_tokens, length) // num_pieces, 1) * num_pieces
    return batch if kept >= length else _narrowed(batch, entries, kept)


def length_of(batch: Batch, sharding: SequenceSharding) -> int:
    """Return how many tokens the sequences of a batch have."""
    return _length_of(batch, _entries_of(batch, sharding))


def without_last(batch: Batch, num_pieces: int, sharding: SequenceSharding) -> Batch | None:
    """Return all sequences without their last token, if they divided with it and can be padded without it."""
    entries = _entries_of(batch, sharding)
    length = _length_of(batch, entries)
    if length % num_pieces or length == num_pieces or not (sharding.pads and _can_ignore(entries, sharding)):
        return None
    return _narrowed(batch, entries, length - 1)


def _narrowed(batch: Batch, entries: Mapping[str, Entry], length: int) -> Batch:
    return {
        name: each.narrow(entries[name].dim, 0, length) if name in entries else each for name, each in batch.items()
    }


def _entries_of(batch: Batch, how: SequenceSharding) -> dict[str, Entry]:
    """Return the entries of a batch that have one value per token."""
    known: dict[str, Entry | int | None] = {**ENTRIES, **how.entries}
    found = {}
    for name, each in batch.items():
        entry = known.get(name)
        if isinstance(each, Tensor) and entry is not None:
            found[name] = Entry(dim=entry) if isinstance(entry, int) else entry
    if not found:
        raise ShardwiseError(
            f"no entry of the batch is known to have something for each token; it has {', '.join(batch)}",
            remedy='entries={"tokens": 1}, the dim of each that has',
        )
    length = _length_of(batch, found)
    for name, each in batch.items():
        if isinstance(each, Tensor) and name not in known and length in each.shape[1:]:
            raise ShardwiseError(
                f"{name} is {list(each.shape)}: are its {length} the {length} tokens of the sequence, which are cut?",
                remedy=f'entries={{"{name}": {list(each.shape).index(length, 1)}}}, or None if all ranks get it whole',
            )
    for path, each in nodes(batch):
        if isinstance(each, Tensor) and path not in batch and length in each.shape[1:]:
            raise ShardwiseError(
                f"{path} is {list(each.shape)}, inside of another entry: are its {length} the {length} tokens of the"
                " sequence? cp cuts entries of the batch itself",
                remedy=f"batch = {{..., 'mine': batch[{path.partition('[')[0]!r}]...}}, or cp=1",
            )
    return found


def _length_of(batch: Batch, entries: Mapping[str, Entry]) -> int:
    """Return the tokens per sequence, on which all entries must agree."""
    lengths: dict[str, int] = {}
    for name, entry in entries.items():
        shape = batch[name].shape
        if name == "attention_mask" and len(shape) > 2:
            raise ShardwiseError(
                f"attention_mask is {list(shape)}: a mask of all tokens against all is not cut",
                remedy="attention_mask as [batch, tokens] for padding, documents as [batch, tokens] for packed ones",
            )
        if not -len(shape) <= entry.dim < len(shape):
            raise ShardwiseError(
                f"{name} is {list(shape)} and has no dim {entry.dim}, along which its tokens would be",
                remedy=f'{name} with a value for each token, or entries={{"{name}": None}} if it has none for them',
            )
        lengths[name] = shape[entry.dim]
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ShardwiseError(f"entries of the batch differ in how many tokens a sequence has: {said}")
    return next(iter(lengths.values()))


def _can_ignore(entries: Mapping[str, Entry], how: SequenceSharding) -> bool:
    """Return whether padding tokens can be left out of the loss."""
    return how.predicts or any(entry.ignores for entry in entries.values())


def _num_added(length: int, num_ranks: int, entries: Mapping[str, Entry], how: SequenceSharding) -> int:
    """Return how many padding tokens make the sequence divide."""
    num_pieces = 2 * num_ranks
    num_added = -length % num_pieces
    can_ignore = _can_ignore(entries, how)
    if num_added and not (how.pads and can_ignore):
        below = length + num_added - num_pieces
        sizes = " or ".join(str(size) for size in (below, length + num_added) if size)
        reason = "" if can_ignore else ", and the batch has no labels that would leave added tokens out of the loss"
        raise ShardwiseError(
            f"a sequence of {length} tokens does not divide into {num_pieces} pieces, two for each of cp={num_ranks}"
            f" ranks{reason}",
            remedy=f"sequences of {sizes} tokens",
        )
    return num_added


def _documents(batch: Batch, how: SequenceSharding) -> Tensor | None:
    """Return the document number of each token: given, or from positions where the module packs documents that way."""
    if isinstance(batch.get("documents"), Tensor):
        return number_documents(batch["documents"])
    positions = batch.get(how.positions or "")
    if not how.packs or batch.get("attention_mask") is not None or batch.get("use_cache"):
        return None
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    starts = torch.nn.functional.pad(positions.diff() != 1, (1, 0))
    return starts.cumsum(1) if bool(starts.any()) else None


def _positions(batch: Batch, entries: Mapping[str, Entry], documents: Tensor | None, length: int) -> Tensor:
    """Return the position of every token in its sequence, or in its document."""
    if documents is not None:
        return positions_in(documents)
    first = next(name for name, entry in entries.items() if entry.dim == 1)
    return torch.arange(length, device=batch[first].device).repeat(batch[first].shape[0], 1)


def _hidden(attention_mask: Tensor | None) -> Tensor | None:
    """Return the keys that no query sees; None if there are none."""
    if attention_mask is None:
        return None
    hidden = attention_mask == 0
    return hidden if bool(hidden.any()) else None
