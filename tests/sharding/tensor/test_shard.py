"""A user's own modules, cut over ranks; what is refused; and what others build on."""

from typing import Any

import pytest

from shardwise.ranks.spawn import Ranks
from tests.sharding.tensor import programs
from tests.sharding.tensor.programs import Outcome


def check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.loss < 1e-5
        assert outcome.worst < 1e-5, outcome.where
        assert outcome.norm < 1e-5


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(4, 2), (3, 1), (5, 5), *(pytest.param(*each, marks=pytest.mark.whole) for each in ((4, 4), (6, 3)))],
)
def test_heads_are_shared_out_whatever_their_number(
    two: Ranks, num_heads: int, num_kv_heads: int, sequence: bool
) -> None:
    cases = [(programs.net, (97, 24, num_heads, num_kv_heads), {"sequence": sequence})]
    for outcomes in two.run(programs.parities, cases, timeout_seconds=60):
        check(outcomes)


def test_three_key_heads_on_two_ranks_are_two_and_one(two: Ranks) -> None:
    first, second = two.run(programs.parity, programs.net, (97, 24, 6, 3), timeout_seconds=60)
    assert first.local_sizes["blocks.0.attention.query.weight"] == (4 * 4, 16)
    assert second.local_sizes["blocks.0.attention.query.weight"] == (2 * 4, 16)
    assert first.local_sizes["blocks.0.attention.pair.weight"] == (2 * 2 * 4, 16)
    assert "blocks.0.attention.num_kv_heads 3 -> 2" in first.description


def test_an_odd_vocabulary_is_padded_and_the_padding_counts_nowhere(two: Ranks) -> None:
    outcomes = two.run(programs.parity, programs.net, (97, 24, 4, 4), timeout_seconds=60)
    check(outcomes)
    assert [each.local_sizes["words.weight"] for each in outcomes] == [(49, 16)] * 2


def test_channels_that_do_not_divide_are_shared_out_unevenly(three: Ranks) -> None:
    outcomes = three.run(programs.parity, programs.net, (50, 25, 3, 3), timeout_seconds=60)
    check(outcomes)
    assert [each.local_sizes["blocks.0.feed.1.weight"] for each in outcomes] == [(9, 16), (8, 16), (8, 16)]


def test_a_parameter_used_between_shards_has_its_gradient_summed(two: Ranks) -> None:
    outcome = two.run(programs.parity, programs.net, (97, 24, 4, 4), timeout_seconds=60)[0]
    assert outcome.partial == ("blocks.0.attention.scale", "blocks.1.attention.scale")


@pytest.mark.parametrize("widths", [(8, 12, 8), (8, 12, 10, 12, 8), (8, 12, 10, 9)])
def test_linear_layers_of_a_users_module_are_taken_in_pairs(two: Ranks, widths: tuple[int, ...]) -> None:
    outcomes = two.run(programs.parity, programs.mlp, widths, timeout_seconds=60)
    check(outcomes)
    sizes = outcomes[0].local_sizes
    assert sizes["layers.0.weight"] == (6, 8)
    assert sizes["layers.1.weight"] == (widths[2], 6)


def test_a_dictionary_says_which_layers_are_cut_and_all_others_stay_whole(two: Ranks) -> None:
    spec = {"blocks.*.feed.1": "column", "blocks.*.feed.3": "row"}
    outcomes = two.run(programs.parities, [(programs.net, (97, 24, 4, 4), {"spec": spec})], timeout_seconds=60)
    for (outcome,) in outcomes:
        check([outcome])
        assert outcome.local_sizes["blocks.1.feed.1.weight"] == (12, 16)
        assert outcome.local_sizes["blocks.1.attention.query.weight"] == (16, 16)
        assert outcome.local_sizes["head.weight"] == (97, 16)


def test_what_is_named_whole_stays_whole_and_the_rest_is_found(two: Ranks) -> None:
    spec = {"blocks.0.attention": "whole"}
    outcomes = two.run(programs.parities, [(programs.net, (97, 24, 4, 4), {"spec": spec})], timeout_seconds=60)
    for (outcome,) in outcomes:
        check([outcome])
        assert outcome.local_sizes["blocks.0.attention.query.weight"] == (16, 16)
        assert outcome.local_sizes["blocks.1.attention.query.weight"] == (8, 16)


def test_a_layer_sends_four_all_reduces_or_their_halves(two: Ranks) -> None:
    """Four sums of batch x sequence x width in a block, forward and backward; facts of the design, section 2.5."""
    cases: list[Any] = [(programs.net, (97, 24, 4, 4), {"sequence": sequence}) for sequence in (False, True)]
    whole, shared = two.run(programs.parities, cases, timeout_seconds=60)[0]
    activation = 2 * 12 * 16 * 4
    # Of two blocks; and the embedding, and the input gradient of the head. Three numbers a token are the loss's.
    assert whole.calls == {"all_reduce": 2 * 4 + 2 + 2}
    assert whole.bytes == {"all_reduce": (2 * 4 + 2) * activation + 3 * 2 * 12 * 4}
    # Halves, and a gather where the first block's input gradient and the last block's output become whole.
    assert shared.calls == {"all_gather": 2 * 4 + 2, "reduce_scatter": 2 * 4, "all_reduce": 2 + 2}
    assert shared.bytes["all_gather"] == (2 * 4 + 2) * activation // 2
    assert shared.bytes["reduce_scatter"] == 2 * 4 * activation // 2


@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_backward_in_halves_sends_nothing_for_weight_gradients(
    two: Ranks, sequence: bool, num_chunks: int | None
) -> None:
    for error, first, second in two.run(programs.halves, sequence, num_chunks, timeout_seconds=60):
        assert error < 1e-5
        assert sum(first.values()) > 0
        assert second == {}


@pytest.mark.parametrize(
    ("family", "sequence"),
    [
        ("llama", True),
        ("gpt2", False),
        ("t5", True),
        *(pytest.param(*each, marks=pytest.mark.whole) for each in (("llama", False), ("gpt2", True), ("t5", False))),
    ],
)
def test_a_cut_module_is_split_into_stages_like_any_other(two: Ranks, family: str, sequence: bool) -> None:
    for loss, gradient in two.run(programs.staged, family, sequence, timeout_seconds=120):
        assert loss < 1e-5
        assert gradient < 1e-5


def test_weights_of_a_meta_module_do_not_depend_on_how_it_is_cut(two: Ranks) -> None:
    assert two.run(programs.drawn_alike, 7, timeout_seconds=60) == [True, True]


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_repeats_from_a_seed_and_leaves_ranks_in_step(two: Ranks, sequence: bool) -> None:
    (first, in_step), (second, _) = two.run(programs.dropped, sequence, timeout_seconds=60)
    assert first == second
    assert first[0] == first[1]
    assert in_step


def test_heads_on_different_ranks_drop_different_things(two: Ranks) -> None:
    (first,), (second,) = two.run(programs.masks, 0.5, timeout_seconds=60)
    assert first.shape == second.shape
    assert not first.equal(second)


NET = (97, 24, 4, 4)


@pytest.mark.parametrize(
    ("make", "arguments", "options", "text"),
    [
        (
            programs.net, NET, {"spec": {"blocks.*.feed.1": "columns"}},
            "unknown way to cut a layer 'columns'; known: column, row, vocabulary, whole\n  try: column",
        ),
        (
            programs.net, NET, {"spec": {"block.*.feed.1": "column"}},
            "no layer of the module is named 'block.*.feed.1'\n  try: \"blocks.*.feed.1\"",
        ),
        (
            programs.net, NET, {"spec": {"blocks.0.feed.1": "column"}},
            "blocks.0.feed.1 cannot be a column: no other layer reads its channels one by one\n"
            '  try: tensor={"blocks.0.feed.1": "whole"}',
        ),
        (
            programs.net, NET, {"example": None},
            "without an example there is no way to see what of Net can be cut\n"
            "  try: shard(module, group, example={...}), with one microbatch",
        ),
        (
            programs.net, NET, {"num_chunks": 0},
            "tensor_chunks=0: what a layer sends is one chunk or more\n"
            "  try: tensor_chunks=1, or none, for as many as pay",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_what_would_do(
    two: Ranks, make: Any, arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    assert two.run(programs.refusal, make, arguments, options, timeout_seconds=60) == [text] * 2


def test_fewer_heads_than_ranks_are_refused_with_a_plan_that_would_do(three: Ranks) -> None:
    said = three.run(programs.refusal, programs.net, (97, 24, 2, 2), {}, timeout_seconds=60)[0]
    assert said == (
        "blocks.0.attention.query, blocks.0.attention.pair and blocks.0.attention.out can be split into 2 pieces "
        "(heads or channels), fewer than tp=3\n"
        '  try: tp=2, or the layer whole on every rank: tensor={"blocks.0.attention.out": "whole"}'
    )
