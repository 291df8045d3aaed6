"""What a rank gets of a batch, and what is refused."""

from typing import Any

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.sharding.context.sequence_shards import Entry, SequenceSharding, shard_sequence, shift_labels
from shardwise.sharding.zigzag import zigzag_unshard

IDS = torch.arange(10, 34).view(2, 12)


def parts_of(batch: dict[str, Any], num_ranks: int, sharding: SequenceSharding | None = None) -> list[Any]:
    return [shard_sequence(batch, rank=rank, num_ranks=num_ranks, sharding=sharding) for rank in range(num_ranks)]


def test_every_known_entry_is_cut_and_nothing_else() -> None:
    batch: dict[str, Any] = {
        "input_ids": IDS,
        "inputs_embeds": torch.randn(2, 12, 3),
        "position_ids": torch.arange(36).view(3, 1, 12),
        "token_type_ids": IDS % 2,
        "temperature": torch.tensor([1.0, 2.0]),
        "name": "a batch",
    }
    parts = parts_of(batch, 3)
    for name, dim in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", 2), ("token_type_ids", 1)):
        assert torch.equal(zigzag_unshard([part[name] for part in parts], dim), batch[name])
    assert all(part["temperature"] is batch["temperature"] and part["name"] == "a batch" for part in parts)


def test_positions_are_those_in_the_whole_sequence() -> None:
    assert [part["position_ids"].tolist() for part in parts_of({"input_ids": IDS}, 2)] == [
        [[0, 1, 2, 9, 10, 11]] * 2,
        [[3, 4, 5, 6, 7, 8]] * 2,
    ]


def test_positions_begin_again_in_each_document() -> None:
    documents = torch.tensor([[7] * 5 + [3] * 7, [0] * 12])
    parts = parts_of({"input_ids": IDS, "documents": documents}, 3)
    positions = zigzag_unshard([part["position_ids"] for part in parts], 1)
    assert positions.tolist() == [[*range(5), *range(7)], [*range(12)]]
    assert parts[0].tokens.documents.tolist() == [[0] * 5 + [1] * 7, [0] * 12]


def test_positions_that_begin_again_are_documents_where_a_module_packs_so() -> None:
    batch = {"input_ids": IDS, "position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]])}
    assert shard_sequence(batch, rank=0, num_ranks=2).tokens.documents is None
    packed = SequenceSharding(packs=True)
    found = shard_sequence(batch, rank=0, num_ranks=2, sharding=packed).tokens.documents
    assert found is not None
    assert found.tolist() == [[0] * 5 + [1] * 7, [0] * 12]
    # Where padding is given, or a cache is kept, transformers does not look at positions, and so nor do we.
    for word, value in (("attention_mask", torch.ones_like(IDS)), ("use_cache", True)):
        part = shard_sequence({**batch, word: value}, rank=0, num_ranks=2, sharding=packed)
        assert part.tokens.documents is None


def test_the_drawing_is_what_rank_0_of_2_gets() -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), "labels": torch.tensor([[2, 3, 4, 5, 6, 7, 8]])}
    part = shard_sequence(batch, rank=0, num_ranks=2)
    assert part["input_ids"].tolist() == [[1, 2, 7, 0]]
    assert part["labels"].tolist() == [[2, 3, 8, -100]]
    assert part["position_ids"].tolist() == [[0, 1, 6, 0]]
    assert (part.tokens.length, part.tokens.num_real) == (8, 7)


def test_labels_are_shifted_before_they_are_cut() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


def test_a_mask_that_hides_nothing_is_none() -> None:
    assert (
        shard_sequence({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, rank=0, num_ranks=2).tokens.hidden
        is None
    )
    hidden = shard_sequence({"input_ids": IDS, "attention_mask": IDS > 12}, rank=0, num_ranks=2).tokens.hidden
    assert hidden is not None
    assert hidden.sum() == 3


def test_what_the_module_does_not_take_is_kept_from_it() -> None:
    batch = {"input_ids": IDS, "documents": torch.zeros_like(IDS)}
    part = shard_sequence(
        batch, rank=0, num_ranks=2, sharding=SequenceSharding(drops=frozenset({"documents"}), positions=None)
    )
    assert list(part) == ["input_ids"]


def test_a_users_entries_are_cut_as_they_say() -> None:
    batch = {"tokens": IDS, "table": torch.zeros(2, 12), "weights": torch.ones(12, 2)}
    how = SequenceSharding(entries={"tokens": 1, "table": None, "weights": Entry(dim=0)})
    part = shard_sequence(batch, rank=0, num_ranks=3, sharding=how)
    assert part["tokens"].tolist() == [[10, 11, 20, 21], [22, 23, 32, 33]]
    assert part["table"] is batch["table"]
    assert part["weights"].shape == (4, 2)


@pytest.mark.parametrize(
    ("batch", "sharding", "problem", "remedy"),
    [
        (
            {"input_ids": IDS[:, :11]},
            SequenceSharding(),
            "a sequence of 11 tokens does not divide into 4 pieces, two for each of cp=2 ranks, and the batch has no"
            " labels that would leave added tokens out of the loss",
            "sequences of 8 or 12 tokens",
        ),
        (
            {"input_ids": IDS[:, :3], "labels": IDS[:, :3]},
            SequenceSharding(pads=False),
            "a sequence of 3 tokens does not divide into 4 pieces, two for each of cp=2 ranks",
            "sequences of 4 tokens",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 12, 12)},
            SequenceSharding(),
            "attention_mask is [2, 1, 12, 12]: a mask of all tokens against all is not cut",
            "attention_mask as [batch, tokens] for padding, documents as [batch, tokens] for packed ones",
        ),
        (
            {"input_ids": IDS, "labels": torch.zeros(2)},
            SequenceSharding(),
            "labels is [2] and has no dim 1, along which its tokens would be",
            'labels with a value for each token, or entries={"labels": None} if it has none for them',
        ),
        (
            {"input_ids": IDS, "labels": IDS[:, :8]},
            SequenceSharding(),
            "entries of the batch differ in how many tokens a sequence has: input_ids 12, labels 8",
            None,
        ),
        (
            {"input_ids": IDS, "speakers": IDS},
            SequenceSharding(),
            "speakers is [2, 12]: are its 12 the 12 tokens of the sequence, which are cut?",
            'entries={"speakers": 1}, or None if all ranks get it whole',
        ),
        (
            {"pixels": torch.zeros(2, 3, 8, 8)},
            SequenceSharding(),
            "no entry of the batch is known to have something for each token; it has pixels",
            'entries={"tokens": 1}, the dim of each that has',
        ),
    ],
)
def test_what_cannot_be_cut_is_told(
    batch: dict[str, Any], sharding: SequenceSharding, problem: str, remedy: str | None
) -> None:
    with pytest.raises(ShardwiseError) as error:
        shard_sequence(batch, rank=0, num_ranks=2, sharding=sharding)
    assert error.value.problem == problem
    assert error.value.remedy == remedy
