"""Which graph a decode step uses: capturing one stands in the way of all requests."""

from typing import Any

import torch

from shardwise.serving.decode_graphs import PATIENCE, SIZES, DecodeGraphs


def graphs(*captured: int) -> DecodeGraphs:
    made = DecodeGraphs(
        lambda rows: rows.keys.float(), torch.zeros(256, dtype=torch.int64), num_rows=256, width=4, block_size=16
    )
    held: Any = None
    made._captured = {(size, False): held for size in captured}
    return made


def test_a_size_that_nothing_near_is_there_for_is_captured() -> None:
    assert graphs()._choose(200, False) == 224
    assert graphs(256)._choose(16, False) == 16
    assert graphs(32)._choose(33, False) == 48
    assert graphs(256)._choose(200, True) == 224, "draws with cuts are others"


def test_a_larger_graph_serves_until_a_capture_is_worth_it() -> None:
    made = graphs(256)
    assert [made._choose(100, False) for _ in range(PATIENCE + 1)] == [256] * PATIENCE + [128]
    made._captured[128, False] = made._captured[256, False]
    assert made._choose(100, False) == 128
    assert made._choose(70, False) == 128, "that of the nearest size"


def test_the_fewest_rows_have_their_own() -> None:
    assert [graphs(8)._choose(count, False) for count in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_requests_that_end_one_by_one_capture_few_sizes() -> None:
    made = graphs()
    for num_rows in range(256, 0, -1):
        for _ in range(4):
            made._captured.setdefault((made._choose(num_rows, False), False), made._captured.get((256, False)))  # type: ignore[arg-type]
    assert len(made._captured) < len(SIZES) / 2 + 2
