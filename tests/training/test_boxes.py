"""Boxes: whatever a rank holds of a tensor is found again in the whole, number by number."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.training.checkpoint.boxes import Box, all_places, run_boxes, views, whole_box

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes, st.data())
def test_a_run_of_flattened_numbers_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(run_boxes(shape, start, stop))
    found = [whole[tuple(map(slice, box.start, box.stop))].reshape(-1) for box in boxes]
    assert torch.cat(found).tolist() == list(range(start, stop)) if found else start == stop
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_run_of_the_drawing() -> None:
    assert list(run_boxes((4, 4), 3, 13)) == [Box((0, 3), (1, 1)), Box((1, 0), (2, 4)), Box((3, 0), (1, 1))]


@settings(deadline=None)
@given(shapes.filter(len), st.data())
def test_views_of_a_cut_and_padded_tensor_lie_where_the_whole_has_their_numbers(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    kept = data.draw(st.lists(st.integers(0, shape[dim] - 1), unique=True, min_size=1))
    places = all_places(shape)
    places[dim] = np.array(kept)
    padding = data.draw(st.integers(0, 2))
    local = whole.index_select(dim, torch.tensor(kept))
    nothing = torch.full((*shape[:dim], padding, *shape[dim + 1 :]), -1)
    local = torch.cat((local, nothing), dim).contiguous()
    start = data.draw(st.integers(0, local.numel() - 1))
    stop = data.draw(st.integers(start, local.numel()))
    run = local.view(-1)[start:stop].clone()
    seen = []
    for box, numbers in views(run, tuple(local.shape), start, places):
        assert torch.equal(numbers, whole[tuple(map(slice, box.start, box.stop))])
        seen += numbers.reshape(-1).tolist()
        numbers.fill_(-2)
    assert sorted(seen) == sorted(each for each in local.view(-1)[start:stop].tolist() if each >= 0)
    assert set(run.tolist()) <= {-1, -2}, "views write through"


@settings(deadline=None)
@given(st.data())
def test_overlaps_are_what_two_boxes_have_in_common(data: st.DataObject) -> None:
    shape = (6, 5)
    cells = np.zeros((2, *shape), dtype=bool)
    boxes = []
    for number in range(2):
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        size = tuple(data.draw(st.integers(1, whole - first)) for whole, first in zip(shape, start, strict=True))
        boxes.append(Box(start, size))
        cells[number][tuple(map(slice, boxes[-1].start, boxes[-1].stop))] = True
    overlap = boxes[0].find_overlap(boxes[1])
    both = cells[0] & cells[1]
    assert (overlap is None) == (not both.any())
    if overlap is not None:
        assert overlap.num_numbers == both.sum()
        inside = np.zeros(boxes[0].size, dtype=bool)
        inside[overlap.within(boxes[0])] = True
        assert inside.sum() == both.sum()
    assert whole_box(shape).find_overlap(boxes[0]) == boxes[0]
