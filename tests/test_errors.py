import pickle

import pytest

from shardwise.errors import ShardwiseError, nearest, unknown


class NarrowError(ShardwiseError):
    pass


def test_an_error_prints_its_problem_and_on_the_next_line_what_to_try() -> None:
    error = ShardwiseError(
        "stage 3 needs 91.2 GiB but h100-80g has 78.9 GiB free (12.3 GiB short)",
        remedy="--plan pp=16, or recompute=full (-38.0 GiB, +28 % time)",
    )
    assert str(error) == (
        "stage 3 needs 91.2 GiB but h100-80g has 78.9 GiB free (12.3 GiB short)\n"
        "  try: --plan pp=16, or recompute=full (-38.0 GiB, +28 % time)"
    )


def test_an_error_without_a_remedy_prints_its_problem_alone() -> None:
    assert str(ShardwiseError("no microbatches")) == "no microbatches"


@pytest.mark.parametrize("kind", [ShardwiseError, NarrowError])
def test_an_error_crosses_to_another_process_with_its_remedy(kind: type[ShardwiseError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("rank 3 stopped", remedy="more memory")))
    assert type(copy) is kind
    assert (copy.problem, copy.remedy) == ("rank 3 stopped", "more memory")


@pytest.mark.parametrize(
    ("word", "meant"), [("zbv", "zb-v"), ("ZB-V", "zb-v"), ("1f1", "1f1b"), ("xyz", None), ("", None)]
)
def test_the_nearest_word_is_found_or_none(word: str, meant: str | None) -> None:
    assert nearest(word, ["1f1b", "gpipe", "zb-v"]) == meant


def test_an_unknown_word_is_told_with_all_known_ones_and_the_nearest() -> None:
    error = unknown("schedule", "zbv", iter(["1f1b", "gpipe", "zb-v"]))
    assert str(error) == "unknown schedule 'zbv'; known: 1f1b, gpipe, zb-v\n  try: zb-v"


def test_an_unknown_word_near_to_nothing_has_no_remedy() -> None:
    assert unknown("schedule", "qqq", ["1f1b"]).remedy is None
