"""Masks and positions, drawn."""

import torch
from torch import Tensor

from shardwise.nets.mask import causal_mask, find_starts, number_documents, positions_in

CPU = torch.device("cpu")


def drawn(mask: Tensor | None) -> list[str]:
    assert mask is not None
    return ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()]


def test_a_window_counts_the_token_itself() -> None:
    assert drawn(causal_mask(5, 5, CPU, window=2)) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]


def test_queries_are_the_last_of_the_keys() -> None:
    assert drawn(causal_mask(2, 5, CPU)) == ["xxxx.", "xxxxx"]
    assert drawn(causal_mask(1, 5, CPU, window=3)) == ["..xxx"]


def test_documents_do_not_see_each_other() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    assert drawn(causal_mask(5, 5, CPU, documents=documents)) == ["x....", "xx...", "..x..", "..xx.", "..xxx"]


def test_padding_is_seen_by_nobody() -> None:
    padding = torch.tensor([[0, 1, 1], [1, 1, 1]])
    mask = causal_mask(3, 3, CPU, attention_mask=padding)
    assert drawn(mask) == ["...", ".x.", ".xx"]
    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)


def test_there_is_no_mask_where_the_order_says_it_all() -> None:
    assert causal_mask(5, 5, CPU) is None
    assert causal_mask(5, 5, CPU, window=5) is None
    assert causal_mask(1, 5, CPU) is None


def test_runs_of_ids_are_documents_and_positions_begin_anew_in_each() -> None:
    documents = torch.tensor([[7, 7, 3, 3, 3, 7], [1, 2, 3, 3, 3, 3]])
    assert number_documents(documents).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2]]
    assert positions_in(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]


def test_sequences_begin_with_rows_and_with_the_documents_in_them() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    assert find_starts(documents.shape, CPU, documents).tolist() == [0, 2, 5, 6, 12]
    assert find_starts(documents.shape, CPU, None).tolist() == [0, 6, 12]
    assert find_starts(documents.shape, CPU, None).dtype == torch.int32
