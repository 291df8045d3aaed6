"""Values between ranks."""

from typing import Any

import pytest
import torch

from shardwise.ranks.message_layout import HEADER_LENGTH, Key, Layout, decode, describe, encode, length_of
from shardwise.ranks.spawn import Ranks
from tests.engine import programs

KEY = Key(source=0, target=1, kind="B", maker=3, reader=2, microbatch=7)


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "gloo"])
def shares_memory(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def talks(two: Ranks, shares_memory: bool) -> list[dict[str, Any]]:
    """What came of all that two ranks said to each other."""
    return two.run(programs.talk, shares_memory, timeout_seconds=60)


def test_a_key_prints_as_its_instructions() -> None:
    assert str(KEY) == "2RECV_B7<3"
    assert KEY.sending == "3SEND_B7>2"


@pytest.mark.parametrize("count", [0, 1, 5, 60])
def test_a_description_becomes_bytes_and_back(count: int) -> None:
    description = describe([torch.empty(2, index, 3, dtype=torch.bfloat16) for index in range(count)])
    header = encode(description)
    assert header.numel() == max(HEADER_LENGTH, length_of(header))
    assert decode(header) == description


def test_tensors_of_a_message_lie_aligned_in_one_piece_and_a_single_one_is_not_copied() -> None:
    tensors = [torch.arange(3), torch.ones(5, dtype=torch.bool), torch.ones(2, 2)]
    layout = Layout(describe(tensors))
    assert layout.num_bytes == 64 + 64 + 16
    message = layout.pack(tensors)
    assert message is not None
    again = layout.unpack(message)
    assert all(torch.equal(one, other) for one, other in zip(tensors, again, strict=True))
    assert {tensor.data_ptr() % 64 for tensor in again} == {0}
    single = Layout(describe(tensors[:1]))
    alone = single.pack(tensors[:1])
    assert alone is not None
    assert alone.data_ptr() == tensors[0].data_ptr()
    assert layout.pack(tensors[:1]) is None, "not what was described"


def test_a_single_tensor_that_differs_in_anything_is_not_what_was_described() -> None:
    layout = Layout(describe([torch.zeros(2, 3)]))
    assert layout.pack([torch.zeros(2, 3)]) is not None
    for other in (torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(2, 3).double(), torch.zeros(2, 3).requires_grad_()):
        assert layout.pack([other]) is None


def test_lengths_may_change_between_steps_and_between_microbatches(talks: list[dict[str, Any]]) -> None:
    for talk in talks:
        assert talk["lengths"] == [True] * 9


def test_headers_are_sent_only_when_a_signature_or_a_message_is_new(talks: list[dict[str, Any]]) -> None:
    # Steps "a", "a", "a" with gradients too, that again, "b", "a", and None, which agrees on nothing.
    for talk in talks:
        assert talk["headers"] == [2, 1, 3, 2, 2, 1, 2]


def test_a_message_may_be_of_many_tensors_or_none_or_large(talks: list[dict[str, Any]]) -> None:
    assert [talk["many"] for talk in talks] == [True, True]


def test_tensors_of_one_message_are_written_to_apart(talks: list[dict[str, Any]]) -> None:
    assert {talk["writes"] for talk in talks} == {"tensor([2., 2., 2., 2.])"}


def test_a_shape_that_changes_under_one_signature_is_refused_before_it_is_sent(talks: list[dict[str, Any]]) -> None:
    assert talks[0]["change"] == (
        "0SEND_F5>1 sends float32[4]; with this signature it was float32[3], and that is expected\n"
        "  try: begin_step with all that shapes depend on in its signature, or with None if they depend on the data"
    )


def test_what_has_arrived_is_let_go_before_the_step_ends(talks: list[dict[str, Any]], shares_memory: bool) -> None:
    for talk in talks:
        num_let_go, all_arrived = talk["memory"]
        # With gloo the headers take a little of the room; what is copied is not held at all.
        assert num_let_go in ([0] if shares_memory else [4, 5])
        assert all_arrived


def test_what_was_sent_may_be_written_over_when_the_step_has_ended(talks: list[dict[str, Any]]) -> None:
    assert [talk["end"] for talk in talks] == [True, True]


def test_more_than_there_is_room_for_waits_for_it(talks: list[dict[str, Any]], shares_memory: bool) -> None:
    for talk in talks:
        num_left, all_arrived = talk["plenty"]
        assert (num_left > 0) == shares_memory
        assert all_arrived


def test_values_may_go_over_a_group_for_each_direction(two: Ranks, talks: list[dict[str, Any]]) -> None:
    for over_links, talk in zip(two.run(programs.talk_over_links, timeout_seconds=60), talks, strict=True):
        assert over_links == {name: talk[name] for name in over_links}


def test_every_rank_makes_the_links_of_all_pipelines_and_keeps_its_own(four: Ranks) -> None:
    for rank, (order, ranks) in enumerate(four.run(programs.make_links_of_two_pipelines, timeout_seconds=60)):
        assert order == [(0, 1), (1, 0)]
        assert set(map(tuple, ranks.values())) == {(0, 2) if rank % 2 == 0 else (1, 3)}
