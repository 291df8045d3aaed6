"""Bytes that kernels read and write."""

import pytest

from shardwise.model.catalogue import get_model
from shardwise.model.operations import CrossEntropy, Elementwise, Embedding, Matmul, Norm, Operation, Permutation
from shardwise.model.share import Share
from shardwise.model.traffic import traffic


def find(name: str, kind: str, what: type[Operation], called: str | None = None) -> Operation:
    block = {block.kind: block for block, _ in get_model(name).kinds}[kind]
    return next(each for each in block.operations if isinstance(each, what) and called in (None, each.name))


def test_a_product_reads_both_sides_and_writes_the_third_in_each_pass() -> None:
    up = find("llama3.1-8b", "layer", Matmul, "up")
    moved = traffic(up, Share(sequence=1024))
    rows, outputs, weights = (2 * count for count in (1024 * 4096, 1024 * 28672, 4096 * 28672))
    assert moved.read == (rows + weights, outputs + weights, rows + outputs)
    assert moved.written == (outputs, rows, weights)
    assert moved.moved.total == 3 * (rows + outputs + weights)


def test_a_fused_norm_passes_once_and_layer_norm_is_always_fused() -> None:
    elements = 2 * 4096
    norm = find("llama3.1-8b", "layer", Norm)
    assert traffic(norm, Share()).moved[:2] == (2 * elements, 3 * elements)
    # Hugging Face's: 20 bytes read and 16 written of each element forward, 58 and 38 backward.
    assert traffic(norm, Share(fused=False)).read[:2] == (20 * 4096, 58 * 4096)
    assert traffic(norm, Share(fused=False)).written[:2] == (16 * 4096, 38 * 4096)
    layer_norm = find("bloom-7b1", "layer", Norm)
    assert traffic(layer_norm, Share()) == traffic(layer_norm, Share(fused=False))


def test_sequence_parallelism_divides_what_lies_between_the_regions() -> None:
    norm = find("llama3.1-8b", "layer", Norm)
    plain, cut = Share(sequence=1024, tp=8), Share(sequence=1024, tp=8, sequence_parallel=True)
    assert traffic(norm, plain).moved.total == 8 * traffic(norm, cut).moved.total
    inside = find("llama3.1-8b", "layer", Elementwise, "nonlinearity")
    assert traffic(inside, plain) == traffic(inside, cut)


def test_flash_attention_never_moves_the_scores() -> None:
    block = get_model("llama3.1-8b").kinds[1][0]
    attention = next(each for each in block.operations if each.name == "attention")
    short, long = Share(sequence=1024), Share(sequence=2048)
    assert traffic(attention, long).moved.total == 2 * traffic(attention, short).moved.total
    scores = traffic(attention, Share(sequence=1024, flash=False)).moved.forward
    inputs = 2 * 1024 * (2 * 4096 + 2 * 1024)
    assert scores == inputs + 32 * 1024**2 * 4 * 2  # Written, read, written and read again, two bytes each.


def test_the_loss_reads_the_logits_once_where_it_is_fused() -> None:
    loss = find("llama3.1-8b", "head", CrossEntropy)
    assert traffic(loss, Share()).moved[:2] == (2 * 128256, 4 * 128256)
    assert traffic(loss, Share(fused=False)).moved[:2] == (14 * 128256, 14 * 128256)


def test_the_gradient_of_a_table_is_as_large_as_the_table() -> None:
    table = find("llama3.1-8b", "embedding", Embedding)
    assert traffic(table, Share(tp=8)).written.weight == 2 * 128256 // 8 * 4096


def test_a_token_leaves_as_often_as_it_has_experts() -> None:
    sent = find("mixtral-8x7b", "moe", Permutation, "dispatch")
    back = find("mixtral-8x7b", "moe", Permutation, "combine")
    assert traffic(sent, Share()).moved.forward == traffic(back, Share()).moved.forward == 2 * 4096 * 3


@pytest.mark.parametrize("fused", [True, False])
def test_a_block_moves_what_its_operations_move(fused: bool) -> None:
    share = Share(sequence=512, fused=fused)
    for block, _ in get_model("nemotron-3-super").kinds:
        each = [traffic(operation, share).moved.total for operation in block.operations]
        assert block.traffic(share).moved.total == sum(each)
