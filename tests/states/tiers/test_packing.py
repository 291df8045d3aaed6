"""Packed tensors and staging buffers: what lies alike at both ends is one copy, and nothing else is touched."""

import random

import pytest
import torch
from torch import Tensor

from shardwise.states.tiers.packing import ALIGNMENT, Packing, coalesce
from shardwise.states.tiers.staging import StagingBuffers
from tests.states.tiers.late import LateCopyStreams


def filled(num_bytes: int, value: int) -> Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def test_tensors_that_are_packed_alike_are_one_copy() -> None:
    likes = [torch.empty(3, 5), torch.empty(7, dtype=torch.bfloat16), torch.empty(64), torch.empty(0), torch.empty(1)]
    homes, places = (Packing.of(likes).views(filled(Packing.of(likes).num_bytes, value)) for value in (1, 2))
    runs = list(coalesce(zip(places, homes, strict=True)))
    assert len(runs) == 1
    runs[0][0].copy_(runs[0][1])
    assert all(torch.equal(bytes_of(one), bytes_of(other)) for one, other in zip(places, homes, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_runs_copy_what_single_copies_do_and_spare_what_is_between(seed: int) -> None:
    die = random.Random(seed)
    likes = [torch.empty(die.choice([1, 3, 64, 100, 700])) for _ in range(12)]
    size = Packing.of(likes).num_bytes + 8 * ALIGNMENT
    homes_memory, places_memory, plainly = filled(size, 1), filled(size, 2), filled(size, 2)
    homes = Packing.of(likes).views(homes_memory)
    # In the buffer some are left out, and some of those that are there do not come.
    here = sorted(die.sample(range(12), die.randint(2, 12)))
    places, expected = (
        Packing.of(likes[number] for number in here).views(memory) for memory in (places_memory, plainly)
    )
    come = [index for index in range(len(here)) if die.random() < 0.8]
    runs = list(coalesce((places[index], homes[here[index]]) for index in come))
    assert len(runs) <= len(come)
    for place, home in runs:
        assert place.nbytes == home.nbytes
        place.copy_(home)
    for index in come:
        expected[index].copy_(homes[here[index]])
    for place, plain in zip(places, expected, strict=True):
        assert torch.equal(bytes_of(place), bytes_of(plain))


def test_rows_of_one_tensor_are_not_padded_apart() -> None:
    home, buffer = torch.arange(40.0).view(10, 4), torch.zeros(2 * ALIGNMENT, dtype=torch.uint8)
    parts = [home[0:3], home[4:6]]
    places = Packing.of(parts).views(buffer)
    for target, source in coalesce(zip(parts, places, strict=True)):
        target.copy_(source)
    assert torch.equal(home[3], torch.tensor([12.0, 13.0, 14.0, 15.0]))
    assert home[0:3].eq(0).all()
    assert home[4:6].eq(0).all()


def test_buffers_are_taken_when_they_are_needed_and_may_become_more() -> None:
    buffers = StagingBuffers(1, LateCopyStreams(0))
    one, places, _ = buffers.take([torch.empty(4), torch.empty(2, 2)])
    assert [tuple(each.shape) for each in places] == [(4,), (2, 2)]
    assert buffers.has(one, places[1])
    assert not buffers.has(one, torch.empty(4))
    assert not buffers.are_free
    buffers.grow(3)
    others = {buffers.take([torch.empty(1)])[0] for _ in range(2)}
    assert one not in others
    assert len(others) == 2
    assert not buffers.are_free


def test_what_is_between_pieces_of_a_bucket_is_not_written() -> None:
    """Pieces of two groups take turns there: what lies between two of one group is as long as padding by chance."""
    bucket, staging = torch.zeros(160, dtype=torch.float64), torch.ones(96, dtype=torch.float64)
    pairs = [(bucket[96:112], staging[0:16]), (bucket[128:144], staging[32:48])]
    assert len(list(coalesce(pairs))) == 1
    for target, source in coalesce(pairs, is_padded=False):
        target.copy_(source)
    assert bucket.nonzero().flatten().tolist() == [*range(96, 112), *range(128, 144)]
