"""Messages through memory that two ranks share: both ends in one process here, so that every order can be tried."""

import mmap
import os
import random
import socket
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.ranks import shared_memory
from shardwise.ranks.shared_memory import Arrival, Pair


def make_ends() -> tuple[Pair, Pair]:
    """Both ends of what two ranks share."""
    one, other = socket.socketpair()
    memory = os.memfd_create("test")
    size = 2 * shared_memory._HALF_BYTES
    os.ftruncate(memory, size)
    ends = (
        Pair(one, mmap.mmap(memory, size), set(), writes_first_half=True),
        Pair(other, mmap.mmap(memory, size), set(), writes_first_half=False),
    )
    os.close(memory)
    return ends


@pytest.fixture(scope="class")
def narrow() -> Iterator[int]:
    """Little room, so that it is soon used up; and the largest message then."""
    most, untold = 2**14, 2**12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_TELL_AFTER_BYTES", untold)
        patch.setattr(shared_memory, "_HALF_BYTES", 2 * most + 4 * untold)
        yield most


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_messages_arrive_once_in_the_order_of_their_tag_and_unchanged(narrow: int, seed: int) -> None:
    draw = random.Random(seed)
    ends = make_ends()
    sent: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    wanted: dict[tuple[int, int], deque[Arrival]] = defaultdict(deque)
    for _ in range(120):
        me, tag = draw.randrange(2), draw.randrange(1, 4)
        if draw.random() < 0.6:
            # Some so large that a few fill a half.
            size = draw.choice([1, 100, 4_000, narrow - 1, narrow])
            message = torch.full((size,), draw.randrange(256), dtype=torch.uint8)
            ends[me].send(message, tag)
            sent[me, tag].append(message)
        elif len(wanted[1 - me, tag]) < len(sent[1 - me, tag]):
            expected = sent[1 - me, tag][len(wanted[1 - me, tag])]
            wanted[1 - me, tag].append(ends[me].want(torch.empty_like(expected), tag))
    for (source, tag), messages in sent.items():
        for message in list(messages)[len(wanted[source, tag]) :]:
            wanted[source, tag].append(ends[1 - source].want(torch.empty_like(message), tag))
    while not all(arrival.is_here for arrivals in wanted.values() for arrival in arrivals):
        shared_memory._listen_to_one(ends)
    for key, messages in sent.items():
        assert all(map(torch.equal, messages, (arrival.message for arrival in wanted[key])))
    assert not any(end.pending or end.behind for end in ends)
    for end in ends:
        end.close()


def test_room_is_used_again_from_the_start_when_all_is_read() -> None:
    room = shared_memory._Room()
    half = shared_memory._HALF_BYTES
    assert room.take(100) == 0
    assert room.take(half // 2) == 128
    assert room.take(half // 2) is None
    room.free(1)
    assert room.take(100) == 128 + half // 2
    assert room.take(half // 2) is None
    room.free(2)
    assert room.take(half) == 0


def test_what_was_sent_is_read_though_the_sender_is_gone_and_then_its_end_is_said() -> None:
    one, other = make_ends()
    one.send(torch.arange(5), 1)
    one.close()
    arrival = other.want(torch.empty(5, dtype=torch.int64), 1)
    arrival.wait()
    assert arrival.message.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="was closed"):
        other.want(torch.empty(1), 1).wait()
    with pytest.raises(RuntimeError, match="broke"):
        other.send(torch.ones(1), 1)
    other.close()


def test_a_severed_pair_ends_waits_for_messages_and_for_room() -> None:
    one, other = make_ends()
    for _ in range(3):
        one.send(torch.zeros(shared_memory.MOST_BYTES, dtype=torch.uint8), 1)
    assert len(one.pending) == 1
    other.sever()
    with pytest.raises(RuntimeError, match=r"broke|was closed"):
        one.wait()
    with pytest.raises(RuntimeError, match=r"broke|was closed"):
        one.want(torch.empty(1), 1).wait()
    one.close()
    other.close()


def test_a_message_of_another_size_than_expected_is_refused() -> None:
    one, other = make_ends()
    one.send(torch.ones(3), 1)
    with pytest.raises(RuntimeError, match="a message of 12 bytes came where one of 8 was expected"):
        other.want(torch.empty(2), 1).wait()
    one.close()
    other.close()
